"""LoRAs, control networks, IP-Adapters and upscalers in recipes of other programs, and workflows of ComfyUI as files:
by name, never by path; one line for the hostile."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.foreign_cases import INVOKEAI, PAGE, graph, node
from support.refusals import refused

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import in_memory
from qwenimg.common.hub.network_search import control_name, needed_options
from qwenimg.common.jobs.foreign import Foreign, file_name
from qwenimg.common.jobs.foreign_comfyui import PRESETS
from qwenimg.common.jobs.foreign_read import MAX_TEXT, read_foreign, read_workflow
from qwenimg.common.jobs.replay import read_replay
from qwenimg.common.request import control_text
from qwenimg.common.request.lora_text import Lora

PATH = Path("x.png")
FIELDS = "Steps: 20, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 512x768, RNG: CPU"


def a1111(more: str, prompt: str = "a cat") -> Foreign:
    found = read_foreign({"parameters": f"{prompt}\n{FIELDS}, {more}"}, PATH)
    assert found is not None
    return checked(found)


def comfyui(**changes: Any) -> Foreign:
    found = read_foreign({"prompt": graph(**changes)}, PATH)
    assert found is not None
    return checked(found)


def checked(found: Foreign) -> Foreign:
    for line in found.messages():
        print(line)
        assert line.isprintable() and len(line) < 2_000
    for control in found.controls:  # the command line reads them back
        assert control_text.parse(str(control), files=False) == (control,)
    return found


def controls(found: Foreign) -> list[str]:
    return list(map(str, found.controls))


# AUTOMATIC1111

LORA_TAGS: list[tuple[str, list[Lora], str]] = [
    ("<lora:ink:0.8>", [Lora("ink", 0.8)], ""),
    ("<lora:ink>", [Lora("ink", 1.0)], ""),
    ("<LORA: ink : -0.5 >", [Lora("ink", -0.5)], ""),
    ("<lyco:ink:.5>", [Lora("ink", 0.5)], ""),
    ("<lora:ink:1:0.4>", [Lora("ink", 0.4)], "in text encoders was 1"),
    ("<lora:ink:te=0.2:unet=0.4>", [Lora("ink", 0.4)], "in text encoders was 0.2"),
    ("<lora:ink:0.7:lbw=SD>", [Lora("ink", 0.7)], "the name and the strength are used"),
    ("<lora:a:1><lora:b:0.5>", [Lora("a", 1.0), Lora("b", 0.5)], ""),
    ("<lora:ink:0>", [], ""),
    ("<lora:../../etc/passwd:1>", [Lora("passwd", 1.0)], ""),
    ("<lora:C:\\loras\\ink.safetensors:1>", [], "<lora:C:\\loras"),
    ("<lora:ink:x>", [], "left out, without an equivalent here: <lora:ink:x>"),
    ("<lora:ink:nan>", [], "<lora:ink:nan>"),
    ("<lora:a;b:1>", [], "<lora:a;b:1>"),
    ("<lora:>", [], "<lora:>"),
    ("<hypernet:ink:1>", [], "<hypernet:ink:1>"),
]


@pytest.mark.parametrize(("tag", "loras", "words"), LORA_TAGS)
def test_loras_of_a1111(tag: str, loras: list[Lora], words: str) -> None:
    found = a1111("Version: v1", prompt=f"a cat {tag}")
    assert found.loras == loras and found.fields["prompt"] == "a cat"
    assert words in "\n".join(found.messages()) if words else not found.messages()


def test_many_loras_are_cut() -> None:
    found = a1111("Version: v1", prompt="".join(f"<lora:n{i}:1>" for i in range(40)))
    assert len(found.loras) == 32 and "<lora:n39:1>" in "\n".join(found.messages())


UNIT = "Resize Mode: Just Resize, Low Vram: False, Processor Res: 512, Guidance Start: {}, Guidance End: {}"
UNITS: list[tuple[str, list[str], str]] = [
    (f'ControlNet 0: "Module: canny, Model: control_v11p_sd15_canny [d14c016b], Weight: 0.8, {UNIT.format(0, 0.75)}, '
     'Threshold A: 100, Threshold B: 200, Control Mode: Balanced, Hr Option: Both, Save Detected Map: True"',
     ["control_v11p_sd15_canny=canny@PICTURE:0.8:0-0.75"], ""),
    (f'ControlNet 0: "Module: none, Model: control_v11p_sd15_openpose [cab727d4], Weight: 1, {UNIT.format(0.1, 1.0)}", '
     f'ControlNet 1: "Module: depth_leres++, Model: control_v11f1p_sd15_depth [cfd03158], Weight: 0.4, '
     f'{UNIT.format(0, 1)}"',
     ["control_v11p_sd15_openpose=PICTURE:1:0.1-1", "control_v11f1p_sd15_depth=PICTURE:0.4"],
     "is one that depth_leres++ made"),
    ('ControlNet 0: "preprocessor: canny, model: control_v11p_sd15_canny [d14c016b], weight: 1.0, starting/ending: '
     '(0.05, 0.5), resize mode: Just Resize, pixel perfect: True, control mode: Balanced, '
     'preprocessor params: (512, 100, 200)"',
     ["control_v11p_sd15_canny=canny@PICTURE:1:0.05-0.5"], ""),
    ("ControlNet-0 Enabled: True, ControlNet-0 Module: none, ControlNet-0 Model: control_scribble-fp16 [c508311e], "
     "ControlNet-0 Weight: 0.9, ControlNet-0 Guidance Start: 0, ControlNet-0 Guidance End: 0.8",
     ["control_scribble-fp16=PICTURE:0.9:0-0.8"], ""),
    (f'ControlNet 0: "Module: ip-adapter_clip_sd15, Model: ip-adapter_sd15 [6a3f6166], Weight: 0.6, '
     f'{UNIT.format(0, 1)}, Control Mode: ControlNet is more important"', ["ip-adapter_sd15=PICTURE:0.6"], ""),
    (f'ControlNet 0: "Module: none, Model: controlnet-union-sdxl-1.0 [15f10a3b], Weight: 1, {UNIT.format(0, 1)}, '
     'Union Control Type: Depth"', ["controlnet-union-sdxl-1.0=depth@PICTURE"], ""),
    ('ControlNet 0: "Module: reference_only, Model: None, Weight: 1"', [], "ControlNet 0 module: reference_only"),
    ('ControlNet 0: "Module: instant_id_face_embedding, Model: ip-adapter_instant_id_sdxl [eb2d3ec0], Weight: 0.8"', [],
     "ControlNet 0 module: instant_id_face"),
    ('ControlNet: "preprocessor: none, model: qr [a6e58995], weight: 1.35-1.5"', [],
     "ControlNet preprocessor: none, model: qr"),
    ('ControlNet 0: "Module: none, Model: x, Weight: 11"', [], "ControlNet 0 x 11"),
    ('ControlNet 0: "Module: none, Model: x, Guidance Start: 0.9, Guidance End: 0.1"', [], "ControlNet 0 x 1"),
    ('ControlNet 0: "Module: canny, Model: a=b;c"', [], "ControlNet 0 a=b;c"),
    ('ControlNet 0: "Module: canny, Model: x, Threshold A: 50, Threshold B: 60"', ["x=canny@PICTURE"],
     "thresholds of canny"),
    ('ControlNet 0: "Module: none, Model: x, Resize Mode: Crop and Resize"', ["x=PICTURE"], "stretched to the size"),
    ("ControlNet Enabled: False, ControlNet Model: x", [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected", "words"), UNITS)
def test_units_of_a1111(line: str, expected: list[str], words: str) -> None:
    found = a1111(line)
    assert controls(found) == expected and "control_mode" not in found.fields
    assert words in "\n".join(found.messages()) if words else not found.messages()


def test_the_mode_of_a1111s_units() -> None:
    unit = "Module: none, Model: x, Resize Mode: 0, Control Mode: {}"
    assert a1111(f'ControlNet 0: "{unit.format("My prompt is more important")}"').fields["control_mode"] == "prompt"
    assert a1111(f'ControlNet 0: "{unit.format(2)}"').fields["control_mode"] == "control"
    several = a1111(f'ControlNet 0: "{unit.format("Balanced")}", ControlNet 1: "{unit.format(2)}"')
    assert "control_mode" not in several.fields and "several control modes" in "\n".join(several.messages())


def test_an_upscaler_after_the_picture() -> None:
    found = a1111("Postprocess upscale by: 4, Postprocess upscaler: R-ESRGAN 4x+")
    assert (found.enlarger, found.enlarged_by) == ("RealESRGAN_x4plus", 4) and not found.messages()
    for line in (
        "Postprocess upscale by: 99, Postprocess upscaler: x",
        "Postprocess upscale by: 2.5, Postprocess upscaler: x",
    ):
        assert a1111(line).enlarger is None and "Postprocess" in "\n".join(a1111(line).messages())


# ComfyUI


def test_loras_of_comfyui() -> None:
    found = comfyui(
        _3={"model": ["12", 0]},
        _10=node("LoraLoader", lora_name="a\\ink.safetensors", strength_model=0.7, strength_clip=1, model=["4", 0],
                 clip=["4", 1]),
        _11=node("LoraLoaderModelOnly", lora_name="x/wash.safetensors", strength_model=["13", 0], model=["10", 0]),
        _12=node("Power Lora Loader (rgthree)", lora_1={"on": True, "lora": "y.safetensors", "strength": 0.2},
                 lora_2={"on": False, "lora": "z.safetensors", "strength": 1}, model=["11", 0]),
        _13=node("PrimitiveFloat", value=-0.5),
    )  # fmt: skip
    assert found.loras == [Lora("ink", 0.7), Lora("wash", -0.5), Lora("y", 0.2)]
    assert "LoRA ink has one strength here; its strength in text encoders was 1" in "\n".join(found.messages())
    assert "left out" not in "\n".join(found.messages())
    odd = comfyui(_3={"model": ["10", 0]}, _11=node("MathExpression", expression="1"),
                  _10=node("LoraLoader", lora_name="a", strength_model=["11", 0], model=["4", 0]))  # fmt: skip
    assert not odd.loras and odd.refused is None and "its strength_model comes from" in "\n".join(odd.messages())


def test_control_networks_of_comfyui() -> None:
    found = comfyui(
        _3={"positive": ["15", 0], "negative": ["15", 1]},
        _10=node("ControlNetLoader", control_net_name="sdxl/union.safetensors"),
        _11=node("SetUnionControlNetType", control_net=["10", 0], type="hed/pidi/scribble/ted"),
        _12=node("LoadImage", image="/home/x/edges.png"),
        _13=node("ControlNetApplyAdvanced", positive=["6", 0], negative=["7", 0], control_net=["11", 0],
                 image=["12", 0], strength=0.5, start_percent=0, end_percent=0.6),
        _14=node("CannyEdgePreprocessor", image=["16", 0], low_threshold=100, high_threshold=200, resolution=512),
        _15=node("ControlNetApplySD3", positive=["13", 0], negative=["13", 1], control_net=["17", 0], image=["14", 0],
                 strength=1, start_percent=0, end_percent=1, vae=["4", 2]),
        _16=node("ImageScale", image=["12", 0], width=8, height=8),
        _17=node("ControlNetLoader", control_net_name="canny.safetensors"),
    )  # fmt: skip
    assert controls(found) == ["union=softedge@PICTURE:0.5:0-0.6", "canny=canny@PICTURE"]
    assert (found.fields["prompt"], found.fields["negative_prompt"]) == ("glass bottle, 猫", "text, watermark")
    lines = "\n".join(found.messages())
    assert "needs its picture of edges.png, which is not in the recipe" in lines and "/home" not in lines
    assert "there in noise levels" in lines and "left out" not in lines


def test_control_that_is_not_plain() -> None:
    found = comfyui(
        _3={"positive": ["10", 0], "negative": ["12", 0]},
        _10=node("ControlNetApply", conditioning=["6", 0], control_net=["11", 0], image=["13", 0], strength=3e9 // 1e9),
        _11=node("ControlNetLoader", control_net_name="a.pth"),
        _12=node("ControlNetApply", conditioning=["7", 0], control_net=["11", 0], strength=1),
        _13=node("DepthAnythingPreprocessor", image=["14", 0]), _14=node("LoadImage", image="x.png"),
    )  # fmt: skip
    lines = "\n".join(found.messages())
    assert controls(found) == ["a=PICTURE:3"]
    assert "one that DepthAnythingPreprocessor made" in lines and "of the negative prompt alone" in lines
    lost = comfyui(
        _3={"positive": ["10", 0]}, _10=node("ControlNetApply", conditioning=["6", 0], control_net=["99", 0])
    )
    assert not lost.controls and "left out, without an equivalent here: control network 1" in "\n".join(lost.messages())


def test_patches_of_models_and_redux() -> None:
    found = comfyui(
        _3={"model": ["10", 0], "positive": ["12", 0]},
        _10=node("ZImageFunControlnet", model=["4", 0], model_patch=["11", 0], strength=0.75, image=["14", 0]),
        _11=node("ModelPatchLoader", name="Z-Image-Turbo-Fun-Controlnet-Union-2.1.safetensors"),
        _12=node("StyleModelApply", conditioning=["6", 0], style_model=["13", 0], strength=0.5,
                 strength_type="multiply", clip_vision_output=["15", 0]),
        _15=node("CLIPVisionEncode", clip_vision=["16", 0], image=["14", 0], crop="center"),
        _16=node("CLIPVisionLoader", clip_name="sigclip_vision_patch14_384.safetensors"),
        _13=node("StyleModelLoader", style_model_name="flux1-redux-dev.safetensors"),
        _14=node("LoadImage", image="pose.png"),
    )  # fmt: skip
    assert controls(found) == ["Z-Image-Turbo-Fun-Controlnet-Union-2.1=PICTURE:0.75", "flux1-redux-dev=PICTURE:0.5"]
    lines = "\n".join(found.messages())
    assert "of the picture alone there" in lines and "redux-dev.safetensors needs its picture of pose.png" in lines
    assert needed_options(found)[-1].endswith("--control flux-redux=PICTURE:0.5")
    assert control_name("diffusion_pytorch_model", None) == "diffusion_pytorch_model", "a name of many"
    assert file_name("SDXL\\union-promax\\diffusion_pytorch_model.safetensors") == "union-promax"
    lost = comfyui(_3={"positive": ["10", 0]}, _10=node("StyleModelApply", conditioning=["6", 0], strength=1))
    assert not lost.controls and "style model None" in "\n".join(lost.messages())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", "ip=PICTURE:0.8:0-0.9"), ("style transfer", "ip=PICTURE:style=0.8:0-0.9"),
        ("composition (SDXL)", "ip=PICTURE:composition=0.8:0-0.9"), ("ease in", "ip=PICTURE:0.8:0-0.9"),
        ("style and composition", "ip=PICTURE:style=0.8,composition=0.8:0-0.9"), (["9", 9], None),
        (7, "ip=PICTURE:0.8:0-0.9"),
    ],
)  # fmt: skip
def test_ip_adapters_of_comfyui(kind: object, expected: str | None) -> None:
    found = comfyui(
        _3={"model": ["10", 0]},
        _10=node("IPAdapterAdvanced", model=["4", 0], ipadapter=["11", 0], image=["12", 0], weight=0.8,
                 weight_type=kind, start_at=0, end_at=0.9, clip_vision=["13", 0], attn_mask=["14", 0]),
        _11=node("IPAdapterModelLoader", ipadapter_file="ip.safetensors"),
        _12=node("ImageBatch", image1=["14", 0], image2=["14", 0]),
        _13=node("CLIPVisionLoader", clip_name="vit-h.safetensors"), _14=node("LoadImage", image="a.png"),
    )  # fmt: skip
    assert controls(found) == ([expected, "ip=also@PICTURE", "ip=mask@PICTURE"] if expected else [])
    assert ("by layer" in "\n".join(found.messages())) is (kind in ("ease in", 7))


def test_presets_of_ip_adapters() -> None:
    for preset, (small, large) in PRESETS.items():
        for side, name in ((512, small), (1024, large or small)):
            found = comfyui(
                _3={"model": ["10", 0]}, _5={"width": side, "height": side},
                _10=node("IPAdapter", model=["11", 0], ipadapter=["11", 1], image=["12", 0], weight=1,
                         weight_type="standard"),
                _11=node("IPAdapterUnifiedLoader", model=["4", 0], preset=f"{preset} (strength)"),
                _12=node("LoadImage", image="a.png"),
            )  # fmt: skip
            assert controls(found) == [f"{name}=PICTURE"] and found.model is not None


def test_an_upscaler_of_comfyui() -> None:
    found = comfyui(
        _10=node("UpscaleModelLoader", model_name="up/4x-UltraSharp.pth"),
        _11=node("ImageUpscaleWithModel", upscale_model=["10", 0], image=["8", 0]),
    )
    assert (found.enlarger, found.enlarged_by) == ("4x-UltraSharp", None) and "node" not in "\n".join(found.messages())


def test_guidance_of_flux() -> None:
    found = comfyui(_3={"cfg": 1, "positive": ["10", 0]}, _10=node("FluxGuidance", conditioning=["6", 0], guidance=3.5))
    assert found.fields["guidance"] == 3.5 and "negative_prompt" not in found.fields


# InvokeAI


def test_networks_of_invokeai() -> None:
    name = {"name": "canny", "base": "sdxl"}
    found = read_foreign({"invokeai_metadata": json.dumps({
        **INVOKEAI,
        "loras": [{"lora": {"model_name": "old"}, "weight": 0.5}, {"model": {}}, 7],
        "controlnets": [{"control_model": name, "control_weight": 0.6, "begin_step_percent": 0.1,
                         "end_step_percent": 0.8, "control_mode": "more_prompt"},
                        {"control_model": name, "control_weight": [0.1, 0.2]}],
        "ipAdapters": [{"ip_adapter_model": {"name": "ip"}, "weight": 0.5, "method": "style"}],
        "t2iAdapters": [{"t2i_adapter_model": {"name": "sketch"}, "weight": 1}],
    })}, PATH)  # fmt: skip
    assert found is not None and found.loras == [Lora("old", 0.5)] and found.fields["control_mode"] == "prompt"
    assert controls(checked(found)) == ["canny=PICTURE:0.6:0.1-0.8", "sketch=PICTURE", "ip=PICTURE:style=0.5"]
    assert "controlnets canny" in "\n".join(found.messages()) and "loras 7" in "\n".join(found.messages())


# Workflows as files


def workflow(data: object) -> Foreign:
    return checked(read_workflow(in_memory("w.json", json.dumps(data).encode())))


def test_the_two_forms_of_a_workflow_say_the_same() -> None:
    """PAGE is written by hand as ComfyUI's page saves a graph, with a bypassed, a muted and a passing node."""
    page = workflow(PAGE)
    assert page.refused is None, page.refused
    assert page.fields == {
        "prompt": "a girl with a necklace", "negative_prompt": "blurry", "seed": 27, "steps": 30, "guidance": 6.0,
        "sampler": "ddim", "schedule": "model", "width": 512, "height": 640,
    }  # fmt: skip
    assert controls(page) == ["ip-adapter-plus_sd15=PICTURE:0.8", "control_v11p_sd15_canny_fp16=canny@PICTURE:0.7"]
    assert page.loras == [Lora("ink", 0.6)] and page.model == "v1-5-pruned-emaonly"
    assert needed_options(page) == [
        "--control ip-adapter-plus_sd15=PICTURE:0.8 --control sd15-controlnet-canny=canny@PICTURE:0.7"
    ]
    api = json.loads(graph(
        _3={"seed": 27, "steps": 30, "cfg": 6, "sampler_name": "ddim", "scheduler": "ddim_uniform", "model": ["11", 0],
            "positive": ["12", 0]},
        _4={"ckpt_name": "v1-5-pruned-emaonly.safetensors"}, _5={"height": 640}, _6={"text": "a girl with a necklace"},
        _7={"text": "blurry"},
        _10=node("LoraLoader", lora_name="ink.safetensors", strength_model=0.6, strength_clip=0.6, model=["4", 0],
                 clip=["4", 1]),
        _11=node("IPAdapterApply", ipadapter=["13", 0], image=["15", 0], model=["10", 0], weight=0.8,
                 weight_type="original"),
        _12=node("ControlNetApply", conditioning=["6", 0], control_net=["14", 0], image=["16", 0], strength=0.7),
        _13=node("IPAdapterModelLoader", ipadapter_file="ip-adapter-plus_sd15.safetensors"),
        _14=node("ControlNetLoader", control_net_name="control_v11p_sd15_canny_fp16.safetensors"),
        _15=node("LoadImage", image="venus.jpg"),
        _16=node("Canny", image=["15", 0], low_threshold=0.1, high_threshold=0.5),
    ))  # fmt: skip
    other = workflow(api)
    for name in ("fields", "controls", "loras", "model"):
        assert getattr(other, name) == getattr(page, name), name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nodes": []}, "0 nodes"),
        ({"nodes": PAGE["nodes"] * 2}, "two nodes with one id"),
        ({"nodes": [*PAGE["nodes"], 5]}, "without id, type, inputs and outputs"),
        ({"nodes": [*PAGE["nodes"], {"id": 99, "type": "x", "inputs": 5}]}, "without id, type"),
        ({"nodes": [{"id": i, "type": "x"} for i in range(2_001)]}, "2,001 nodes"),
        ({"links": 5}, "no list of at most"),
        ({"links": [[1, 2]]}, "a broken link"),
        ({"links": [[{}, 1, 2]]}, "a broken link"),
        ({"links": [[1, 1, 0]] * 20_001}, "no list of at most"),
    ],
)  # fmt: skip
def test_broken_pages_are_one_line(change: dict[str, Any], why: str) -> None:
    assert why in refused(workflow, {**PAGE, **change})


def test_pages_that_run_in_a_circle_or_are_cut() -> None:
    circle = copy.deepcopy(PAGE)
    circle["nodes"] = [
        *circle["nodes"],
        {"id": 70, "type": "Reroute", "inputs": [{"name": "", "link": 90}], "outputs": []},
    ]
    circle["links"] = [one for one in circle["links"] if one is not None and one[0] != 17] + [
        [90, 70, 0, 70, 0],
        [91, 70, 0, 3, 1],
    ]
    sampler = next(one for one in circle["nodes"] if one["id"] == 3)
    next(one for one in sampler["inputs"] if one["name"] == "positive")["link"] = 91
    assert "comes from nowhere" in str(workflow(circle).refused)
    muted = copy.deepcopy(PAGE)
    next(one for one in muted["nodes"] if one["type"] == "CheckpointLoaderSimple")["mode"] = 2
    assert workflow(muted).model is None
    subgraph = copy.deepcopy(PAGE)
    next(one for one in subgraph["nodes"] if one["id"] == 3)["type"] = "0d7b9d2c-1111-4222-8333-444455556666"
    assert "its samplers are none" in str(workflow(subgraph).refused)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"{}", "no workflow of ComfyUI"), (b'{"a": 1}', "no workflow of ComfyUI"),
        (b'{"nodes": [], "links"', "not JSON"),
        (b'{"nodes": [' + b"[" * 100_000, "nested"), (b'{"\xff": 1}', "UTF-8"),
        (b'{"a": ' + b"1" * MAX_TEXT + b"}", "are read"), (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"3": {"class_type": "x", "inputs": {"a": NaN}}}', "NaN"),
    ],
    ids=range(8),
)  # fmt: skip
def test_files_that_are_no_workflow_are_one_line(raw: bytes, why: str) -> None:
    assert why in refused(read_replay, in_memory("w.json", raw))


# Mutants

WRONG: tuple[object, ...] = (
    None, True, -1, 0, 1.5, 10**19, 1e300, "", "x", "=;:", "../../x", "\ud800", "\x1b[2J", "n" * 2_000, [], {},
    ["3", 0], ["3"], [None, None], [["3"]], {"on": True, "lora": "x"}, [{}, {}], "é" * 50,
)  # fmt: skip


def places(value: object) -> Iterator[tuple[Any, Any]]:
    """Every container in JSON with each of its keys."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(keys):
        yield value, key
        yield from places(one)


def mutated(data: Any, chance: random.Random) -> Any:
    data = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        container, key = chance.choice(list(places(data)))
        if chance.random() < 0.2 and len(container) > 1:
            del container[key]
        else:
            container[key] = copy.deepcopy(chance.choice(WRONG))
    return data


@pytest.mark.sample(0)
def test_mutants_of_workflows_are_read_or_refused_in_one_line() -> None:
    chance, verdicts = random.Random(7), {"read": 0, "not plain": 0, "refused": 0}
    full = json.loads(graph(
        _3={"model": ["11", 0], "positive": ["13", 0], "negative": ["13", 1]},
        _10=node("LoraLoader", lora_name="a", strength_model=0.7, strength_clip=1, model=["4", 0], clip=["4", 1]),
        _11=node("IPAdapterAdvanced", model=["10", 0], ipadapter=["14", 0], image=["12", 0], weight=0.8,
                 weight_type="linear"),
        _12=node("LoadImage", image="a.png"),
        _13=node("ControlNetApplyAdvanced", positive=["6", 0], negative=["7", 0], control_net=["15", 0],
                 image=["16", 0], strength=0.5, start_percent=0, end_percent=0.6),
        _14=node("IPAdapterUnifiedLoader", model=["4", 0], preset="PLUS FACE"),
        _15=node("SetUnionControlNetType", control_net=["17", 0], type="depth"),
        _16=node("Canny", image=["12", 0], low_threshold=0.1, high_threshold=0.5),
        _17=node("ControlNetLoader", control_net_name="c"), _18=node("UpscaleModelLoader", model_name="u.pth"),
        _19=node("ImageUpscaleWithModel", upscale_model=["18", 0], image=["8", 0]),
    ))  # fmt: skip
    for i in range(2_000):
        data = mutated(PAGE if i % 2 else full, chance)
        try:
            found = read_workflow(in_memory("w.json", json.dumps(data).encode()))
            verdicts["read" if found.refused is None else "not plain"] += 1
            for line in (*found.messages(), *needed_options(found), *found.named().values(), found.refused or ""):
                assert line.isprintable()
        except ModelError as error:
            verdicts["refused"] += 1
            assert str(error).isprintable() and len(str(error)) <= 300
    print(verdicts)
    assert verdicts["read"] > 400 and verdicts["not plain"] > 50 and verdicts["refused"] > 100


def test_mutants_of_a1111s_units_are_read_or_refused_in_one_line() -> None:
    chance, verdicts = random.Random(3), {"read": 0, "refused": 0}
    lines = [line for line, *_ in UNITS] + [
        'Lora hashes: "ink: 0a1b2c3d4e5f"',
        "Postprocess upscale by: 4, Postprocess upscaler: x",
    ]
    pieces = ["", ",", '"', ": ", "ControlNet 0", "[", "]}", "-", "9" * 400, "\x1b[2J", "\ud800", "=", ";",
              "Weight: 1e999", "<lora:x:1>", "<lora:", "(0, ", "猫"]  # fmt: skip
    for _ in range(2_000):
        text = chance.choice(lines)
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(text) + 1)
            text = text[:at] + chance.choice(pieces) + text[at + chance.randrange(0, 12) :]
        try:
            a1111(text, prompt=f"a {chance.choice(pieces)} cat <lora:{chance.choice(pieces)}:1>")
            verdicts["read"] += 1
        except ModelError as error:
            verdicts["refused"] += 1
            assert str(error).isprintable() and len(str(error)) <= 300
    print(verdicts)
    assert verdicts["read"] > 1_000
