"""Recipes of other programs: what they say, by name what has no equivalent here, one line for the hostile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foreign_cases import INVOKEAI, MFLUX, graph, node
from support.recipe_cases import RECIPE, recipe
from support.refusals import refused

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.jobs import foreign_a1111
from qwenimg.common.jobs.foreign import FILES, SCHEDULES, Foreign, known_model, known_sampler
from qwenimg.common.jobs.foreign_json import SCHEDULERS
from qwenimg.common.jobs.foreign_read import read_foreign
from qwenimg.common.request import names
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.recipe import a1111_parameters
from qwenimg.common.sampling.schedules import SCHEDULES as OWN_SCHEDULES
from qwenimg.common.sampling.table import SAMPLERS

PATH = Path("x.png")


def read(**texts: str) -> Foreign:
    found = read_foreign({key.replace("XMP", "XML:com.adobe.xmp"): text for key, text in texts.items()}, PATH)
    assert found is not None
    for line in found.messages():
        print(line)
        assert line.isprintable() and len(line) < 2_000
    return found


def told(found: Foreign) -> str:
    return "\n".join(found.messages())


# AUTOMATIC1111

A1111 = (
    "girl with (beret:1.2), <lora:inkStyle:0.8> eyes\nsecond line\nNegative prompt: ugly, (fat)\nblurry\n"
    "Steps: 20, Sampler: DPM++ 2M SDE Karras, CFG scale: 7.5, Seed: 965400086, Size: 512x768, Model hash: 45dee52b, "
    'Model: dreamshaper_8, Clip skip: 2, ENSD: 31337, Lora hashes: "inkStyle: 0a1b, other: 2c3d", '
    "Denoising strength: 0.5, Hires upscale: 2, Hires upscaler: Latent, "
    'Civitai resources: [{"type":"checkpoint","modelVersionId":128713,"weight":1.0},{"a":["}","]"]}], '
    'ControlNet 0: "Module: canny, Model: x", Version: v1.6.0'
)


def test_a1111() -> None:
    found = read(parameters=A1111)
    assert found.fields == {
        "prompt": "girl with (beret:1.2),  eyes\nsecond line", "negative_prompt": "ugly, (fat)\nblurry", "steps": 20,
        "seed": 965400086, "guidance": 7.5, "sampler": "dpmpp_2m_sde", "schedule": "karras", "width": 512,
        "height": 768, "hires": 2.0, "hires_strength": 0.5, "hires_steps": 40, "hires_with": "latent",
    }  # fmt: skip
    assert found.model == "dreamshaper_8" and not found.picture and not found.mask
    lines = told(found)
    for words in (
        "LoRA other, whose strength it does not say", "ENSD 31337", "Civitai resources", "on a GPU", "--clip-skip 1",
        "noise within the steps of dpmpp_2m_sde",
    ):  # fmt: skip
        assert words in lines, words
    assert "v1.6.0" not in lines and "Model hash" not in lines and "inkStyle" not in lines
    assert found.loras == [Lora("inkStyle", 0.8)] and found.lora_hashes == {"inkStyle": "0a1b"}
    assert list(map(str, found.controls)) == ["x=canny@PICTURE"]


SECOND: list[tuple[str, dict[str, Any]]] = [
    ("Hires upscale: 1.5, Denoising strength: 0.7, Hires steps: 10, Hires upscaler: Latent (bicubic)",
     {"hires": 1.5, "hires_strength": 0.7, "hires_steps": 14, "hires_with": "latent-bicubic"}),
    ("Hires resize: 1024x1536, Denoising strength: 0.4, Hires upscaler: None",
     {"hires": 2.0, "hires_strength": 0.4, "hires_steps": 50, "hires_with": "lanczos"}),
    ("Hires resize: 768x0, Denoising strength: 1, Hires steps: 7, Hires upscaler: Latent (nearest-exact)",
     {"hires": 1.5, "hires_strength": 1.0, "hires_steps": 7, "hires_with": "latent-nearest-exact"}),
    ("Hires upscale: 2, Denoising strength: 0.5, Hires upscaler: R-ESRGAN 4x+",
     {"hires": 2.0, "hires_strength": 0.5, "hires_steps": 40}),
    ("Hires resize: 1024x1024, Denoising strength: 0.5, Hires upscaler: Lanczos", {}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), SECOND)
def test_a_second_pass_of_a1111(line: str, expected: dict[str, Any]) -> None:
    """Its steps are those that are run: 10 of 14 at 0.7."""
    found = read(parameters=f"x\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 512x768, {line}")
    assert {name: found.fields[name] for name in found.fields if name.startswith("hires")} == expected
    assert found.upscaler == ("RealESRGAN_x4plus" if "R-ESRGAN" in line else None)
    assert ("Hires resize 1024x1024" in told(found)) is not bool(expected) and not found.picture
    steps = expected.get("hires_steps")
    if steps is not None:
        asked = int((re.search(r"Hires steps: (\d+)", line) or ["", "20"])[1])
        assert names.steps_run(steps, expected["hires_strength"]) == asked


@pytest.mark.parametrize(
    "field",
    [
        "Hires upscale: 99",
        "Hires upscale: nan",
        "Hires upscale: 2, Hires steps: x",
        "Hires upscale: 2, Hires steps: 99999",
        "Hires upscale: 2, Denoising strength: 3",
    ],
)
def test_a_wrong_second_pass_is_one_line(field: str) -> None:
    with pytest.raises(ModelError, match="its recipe of AUTOMATIC1111 has a bad"):
        read(parameters=f"x\nSteps: 20, Sampler: Euler, CFG scale: 7, Seed: 1, Size: 512x768, {field}")


def test_a1111_field_grammar() -> None:
    line = (
        'Steps: 1, A b: "x, \\"y\\": z", C: [1, "]"], D: {"k": [1]}, E: plain words, nonsense, F: "open, G: [open, H: 2'
    )
    assert foreign_a1111.fields(line) == [
        ("Steps", "1"), ("A b", 'x, "y": z'), ("C", '[1, "]"]'), ("D", '{"k": [1]}'), ("E", "plain words"),
        ("", "nonsense"), ("F", '"open'), ("G", "[open"), ("H", "2"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sampler", "own"),
    [
        ("Euler a", ("euler_ancestral", "")), ("Euler", ("euler", "")), ("DPM++ 2M Karras", ("dpmpp_2m", "karras")),
        ("DPM++ 2S a Karras", ("dpmpp_2s_ancestral", "karras")), ("DPM2 a Karras", ("dpm2_ancestral", "karras")),
        ("DPM++ SDE", ("dpmpp_sde", "")), ("DPM++ 3M SDE Exponential", ("dpmpp_3m_sde", "exponential")),
        ("DPM++ 2M SDE Heun Karras", ("dpmpp_2m_sde_heun", "karras")), ("LMS Karras", ("lms", "karras")),
        ("DPM adaptive", ("dpm_adaptive", "")), ("PLMS", ("pndm", "")), ("DDIM", ("ddim", "")), ("UniPC", ("unipc",
        "")),
        ("LCM", ("lcm", "")), ("Euler SGM Uniform", ("euler", "sgmuniform")), ("Restart", (None, "")),
        ("uni_pc_bh2", ("unipc", "")), ("dpm_2_ancestral", ("dpm2_ancestral", "")), ("res_multistep",
        ("res_multistep", "")),
        ("dpmpp_2m_sde_gpu", ("dpmpp_2m_sde", "")), ("euler_cfg_pp", ("euler_cfgpp", "")), ("er_sde", (None, "")),
        ("x" * 5_000, (None, "")),
    ],
)  # fmt: skip
def test_samplers_by_the_names_of_others(sampler: str, own: tuple[str | None, str]) -> None:
    assert known_sampler(sampler) == own


def test_what_the_tables_name_is_there() -> None:
    assert set(SCHEDULERS.values()) <= SAMPLERS.keys()
    assert set(SCHEDULES.values()) <= set(OWN_SCHEDULES)
    assert set(FILES.values()) <= KNOWN.keys()


def test_our_own_a1111_text_is_read_back() -> None:
    own = recipe(
        prompt="two\nlines, (x)", negative_prompt="blurry", guidance=3.25, sampler="dpmpp_2m", schedule="karras"
    )
    found = read(UserComment=a1111_parameters(own))
    keys = ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance", "sampler", "schedule")
    assert found.fields == {key: own[key] for key in keys}  # type: ignore[literal-required]
    assert known_model(found.model or "") == "qwen-image" and found.messages() == []


def test_a_variation_is_written_and_read_as_there() -> None:
    own = recipe(variation="7:0.25")
    text = a1111_parameters(own)
    assert "Variation seed: 7, Variation seed strength: 0.25" in text
    found = read(parameters=text)
    assert found.fields["variation"] == "7:0.25" and found.messages() == []
    start = "x\nSteps: 5, Seed: 1, Size: 8x8, RNG: CPU"
    assert read(parameters=f"{start}, Variation seed: 9, Variation seed strength: 1").fields["variation"] == "9:1.0"
    assert "variation" not in read(parameters=f"{start}, Variation seed: 9, Variation seed strength: 0").fields
    for seed, strength in (("x", "0.5"), ("7", "2"), ("7", "nan"), (str(2**64), "0.5"), ("-1", "0.1"), ("1.5", "0.1")):
        line = refused(read, parameters=f"{start}, Variation seed: {seed}, Variation seed strength: {strength}")
        assert "a bad Variation seed" in line


def test_a_prompt_that_looks_like_fields_is_not_told_apart_and_that_is_said() -> None:
    fake = "cat\nNegative prompt: x\nSteps: 1, Sampler: Euler, Seed: 666, Size: 8x8"
    alone = read(parameters=fake)
    assert alone.fields["seed"] == 666
    real = "Steps: 20, Sampler: Euler, CFG scale: 4, Seed: 7, Size: 512x512, RNG: CPU"
    found = read(parameters=f"{fake}\nNegative prompt: bad\n{real}")
    assert (found.fields["seed"], found.fields["negative_prompt"]) == (7, "bad")
    assert found.fields["prompt"] == fake and "the last of each" in told(found)
    after = read(parameters=f"{real}\nTemplate: a {{b|c}}")
    assert "Template: a {b|c}" in told(after) and after.fields["prompt"] == ""


def test_a1111_from_a_picture_and_a_mask() -> None:
    text = "x\nSteps: 5, Seed: 1, Size: 8x8, Denoising strength: 0.75, Mask blur: 4, RNG: NV"
    found = read(parameters=text)
    assert found.picture and found.mask and found.fields["strength"] == 0.75
    assert found.fields["mask_blur"] == 4.0 and "only_masked" not in found.fields
    assert "Mask" not in told(found) and "'NV'" in told(found) and "GPU" not in told(found)


def test_a1111s_fields_of_a_mask() -> None:
    """As `extra_generation_params` of its image to image names them; other words are left out, by name."""
    fields = "Mask mode: Inpaint not masked, Mask blur: 7, Inpaint area: Only masked, Masked area padding: 32"
    start = "x\nSteps: 5, Seed: 1, Size: 8x8, Denoising strength: 0.75, RNG: CPU"
    found = read(parameters=f"{start}, {fields}, Masked content: latent nothing")
    masks = {"mask_mode": "outside", "mask_blur": 7.0, "only_masked": 32, "mask_fill": "nothing"}
    assert found.mask and found.fields | masks == found.fields and "left out" not in told(found)
    found = read(parameters=f"{start}, Inpaint area: Whole picture, Masked content: dust")
    assert found.mask and not masks.keys() & found.fields.keys()
    assert "Inpaint area Whole picture" in told(found) and "Masked content dust" in told(found)
    for wrong in ("Mask blur: 9999", "Mask blur: x", "Inpaint area: Only masked, Masked area padding: -3"):
        assert "has a bad mask" in refused(read, parameters=f"{start}, {wrong}").replace("only_", "")


def test_our_text_of_a_masked_picture_reads_back() -> None:
    masks = {"mask_mode": "outside", "mask_blur": 2.5, "only_masked": 0, "mask_fill": "noise", "strength": 0.6}
    found = read(parameters=a1111_parameters(recipe(**masks)))
    assert found.fields | masks == found.fields and found.picture and found.mask


@pytest.mark.parametrize(
    "line",
    [
        "Steps: 9999999999999999999999, Sampler: Euler, Seed: 1", f"Steps: {'9' * 5_000}, Sampler: Euler, Seed: 1",
        "Steps: 0, Sampler: Euler, Seed: 1", "Steps: x, Sampler: Euler, Seed: 1", "Steps: 1, Seed: -1, Size: 8x8",
        "Steps: 1, Seed: 1, Size: 0x8", "Steps: 1, Seed: 1, Size: 8", "Steps: 1, Seed: 1, Size: 99999x8",
        "Steps: 1, Seed: 1, CFG scale: nan", "Steps: 1, Seed: 1, CFG scale: 1e3", "Steps: 1, Seed: 1, CFG scale: 101",
        "Steps: 1, Seed: 1, Seed: 2", "Steps: 1, Seed: 1, Clip skip: 1.5",
        "Steps: 1, Seed: 18446744073709551616, Size: 8x8",
        "Steps: 1, Seed: 1, Model: " + "m" * 2_000, "Steps: 1, Seed: 1, Sampler: " + "s" * 2_000,
        "Steps: ١, Seed: 1, Size: 8x8", "Steps: 1, a: b, c: d" + ", e: f" * 300, "Steps: 1, a: b, c: d" + "d" * 200_001,
        "Steps: 1, Seed: 1, Size: 8x8, Denoising strength: 7", "Steps: 1, Seed: \x1b[2J, Size: 8x8",
        "Steps: 1, a: b, c: d, " + "e: [" * 199_000, "Steps: 1, a: b, c: d, " + 'e: "\\' * 199_000,
    ],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_broken_fields_are_one_line(line: str) -> None:
    refused(read_foreign, {"parameters": f"a cat\n{line}"}, PATH)


def test_too_long_texts_are_one_line() -> None:
    fields = "Steps: 1, Seed: 1, Size: 8x8"
    refused(read_foreign, {"parameters": "x" * 100_001 + "\n" + fields}, PATH)
    refused(read_foreign, {"parameters": "x" * 5_000_001}, PATH)
    refused(read_foreign, {"parameters": "\n" * 4_900_000 + fields}, PATH)
    assert read_foreign({"parameters": "\n" * 4_900_000}, PATH) is None
    xmp = "<mflux:seed>1</mflux:seed>" + '<rdf:li xml:lang="x-default">' + "&amp;" * 6_000_000
    assert read(XMP=xmp).fields == {"seed": 1}
    refused(read_foreign, {"prompt": "{" + " " * 5_000_000}, PATH)
    assert len(read(parameters=("Steps: 1, a: b, c: d\n" * 4_000) + fields).fields["prompt"]) < 100_000


@settings(max_examples=150)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(
    ["Steps: 1", ", ", "Seed: 2", "Size: 8x8", "\n", "Negative prompt:", '"', "[", "}", "\\", "Model: /etc/x",
    "CFG scale: ", "7"]
)).map("".join))  # fmt: skip
def test_any_text_is_read_or_refused(text: str) -> None:
    for key in ("parameters", "UserComment", "prompt", "invokeai_metadata", "XML:com.adobe.xmp"):
        try:
            found = read_foreign({key: text}, PATH)
        except ModelError as error:
            assert str(error).isprintable() and len(str(error)) <= 300
            continue
        assert found is None or all(line.isprintable() for line in found.messages())


def test_mflux() -> None:
    found = read(UserComment=json.dumps(MFLUX))
    assert found.fields == {
        key: MFLUX[key] for key in ("prompt", "negative_prompt", "seed", "steps", "guidance", "height", "width")
    }
    assert found.model == "Qwen/Qwen-Image" and known_model(found.model) == "qwen-image"
    lines = told(found)
    assert found.loras == [Lora("ink", 0.8)] and "ink" not in lines and "quantize 8" in lines
    assert "own generator" in lines and "someone" not in lines and "controlnet" not in lines


def test_mflux_strength_runs_the_other_way() -> None:
    found = read(
        UserComment=json.dumps({**MFLUX, "image_path": "/home/x/in.png", "image_strength": 0.4, "guidance": None})
    )
    assert found.picture and found.fields["strength"] == pytest.approx(0.6) and "guidance" not in found.fields


def test_mflux_xmp_alone() -> None:
    xmp = (
        '<rdf:Description xmlns:mflux="http://ns.mflux.ai/1.0/"><dc:description><rdf:Alt><rdf:li xml:lang="x-default">'
        "a &lt;b&gt; &amp; c</rdf:li></rdf:Alt></dc:description><mflux:seed>7</mflux:seed><mflux:steps>4</mflux:steps>"
        "<mflux:guidance>None</mflux:guidance><mflux:model>/Users/x/my-model</mflux:model><mflux:loras>a:1.0</mflux:loras>"
    )
    found = read(XMP=xmp)
    assert found.fields == {"prompt": "a <b> & c", "seed": 7, "steps": 4} and found.model == "my-model"
    assert found.loras == [Lora("a", 1.0)] and "loras" not in told(found)
    refused(read_foreign, {"XML:com.adobe.xmp": xmp.replace(">7<", ">" + "7" * 1_000 + "<")}, PATH)


def test_invokeai() -> None:
    found = read(invokeai_metadata=json.dumps(INVOKEAI), invokeai_graph="{}")
    assert found.fields == {
        "prompt": "landscape", "negative_prompt": "low quality", "width": 768, "height": 432, "seed": 356120443,
        "steps": 50,
        "guidance": 7.5, "guidance_rescale": 0.2, "sampler": "dpmpp_2m_sde", "schedule": "karras",
    }  # fmt: skip
    assert known_model(found.model or "") == "sdxl"
    lines = told(found)
    assert found.loras == [Lora("ink", 0.7)] and list(map(str, found.controls)) == ["canny=PICTURE"]
    for words in ("vae sd-vae-ft-mse", "--clip-skip 2", "within the steps"):
        assert words in lines
    assert "ipAdapters" not in lines and "GPU" not in lines and "seamless" not in lines


def test_invokeai_before_version_4_and_its_noise() -> None:
    old = {
        **INVOKEAI,
        "model": {"model_name": "amix", "base_model": "sd-1"},
        "rand_device": "cuda",
        "scheduler": "dpmpp_2s",
    }
    found = read(invokeai_metadata=json.dumps(old))
    assert found.model == "amix" and "sampler" not in found.fields
    assert "scheduler dpmpp_2s" in told(found) and "on a GPU" in told(found)
    del old["rand_device"]
    assert "may give another picture" in told(read(invokeai_metadata=json.dumps(old)))


def test_invokeai_from_a_picture() -> None:
    found = read(invokeai_metadata=json.dumps({**INVOKEAI, "generation_mode": "sdxl_inpaint", "strength": 0.4}))
    assert found.picture and found.mask and found.fields["strength"] == 0.4


BAD_VALUES: list[tuple[str, object]] = [
    ("seed", "1"), ("seed", 1.0), ("seed", True), ("seed", -1), ("seed", 2**64), ("steps", 0), ("steps", 10**9),
    ("width", "768"),
    ("height", 10**6), ("model", 5), ("model", ["x"]), ("negative_prompt", 1), ("negative_prompt", "n" * 100_001),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_wrong_values_in_tables_are_one_line(key: str, value: object) -> None:
    for where, table in (("UserComment", MFLUX), ("invokeai_metadata", INVOKEAI)):
        assert "x.png" in refused(read_foreign, {where: json.dumps({**table, key: value})}, PATH)


@pytest.mark.parametrize(
    ("where", "table", "key", "value"),
    [
        ("UserComment", MFLUX, "guidance", "4"), ("UserComment", MFLUX, "guidance", [4]), ("UserComment", MFLUX,
        "image_strength", 2),
        ("UserComment", MFLUX, "image_strength", "0.1"), ("UserComment", MFLUX, "prompt", ["a"]),
        ("invokeai_metadata", INVOKEAI, "cfg_scale", [7.5, 7]), ("invokeai_metadata", INVOKEAI, "scheduler", 3),
        ("invokeai_metadata", INVOKEAI, "clip_skip", 1.5), ("invokeai_metadata", INVOKEAI, "clip_skip", 10**15),
        ("invokeai_metadata", INVOKEAI, "generation_mode", {"a": 1}), ("invokeai_metadata", INVOKEAI,
        "positive_prompt", None),
    ],
)  # fmt: skip
def test_wrong_values_of_each_program(where: str, table: dict[str, Any], key: str, value: object) -> None:
    if value is None:
        assert "prompt" not in read(**{where: json.dumps({**table, key: None})}).fields
    else:
        refused(read_foreign, {where: json.dumps({**table, key: value})}, PATH)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}x", '{"a": ' * 50_000, "[" * 500_000, '{"seed": ' + "9" * 5_000 + "}", '{"seed": 1, "seed": 2}',
        '{"seed": NaN}', '{"seed": 1e999}', "[" + "1," * 200_000 + "1]",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_hostile_json_is_one_line(text: str) -> None:
    refused(read_foreign, {"invokeai_metadata": text}, PATH)
    if text.startswith("{"):
        refused(read_foreign, {"prompt": text}, PATH)
        refused(read_foreign, {"UserComment": text.replace("{", '{"mflux_version": "1", ', 1)}, PATH)


def test_comfyui() -> None:
    found = read(prompt=graph(), workflow="{}")
    assert found.fields == {
        "prompt": "glass bottle, 猫", "negative_prompt": "text, watermark", "seed": 156680208700286, "steps": 20,
        "guidance": 8.0, "sampler": "euler", "schedule": "model", "width": 512, "height": 768,
    }  # fmt: skip
    assert known_model(found.model or "") == "sd15" and found.refused is None and not found.picture
    assert found.messages() == [
        "ComfyUI's recipe: its schedule normal is taken as the model's own, whose ends may differ"
    ]


def test_comfyui_with_nodes_in_between() -> None:
    found = read(prompt=graph(
        _3={"model": ["11", 0], "positive": ["12", 0], "seed": ["14", 0], "scheduler": "karras", "denoise": 0.9},
        _10=node("LoraLoader", lora_name="ink.safetensors", strength_model=0.7, model=["4", 0], clip=["4", 1]),
        _11=node("ModelSamplingDiscrete", sampling="v_prediction", model=["10", 0]),
        _12=node("ControlNetApply", strength=0.5, conditioning=["6", 0], control_net=["13", 0]),
        _13=node("ControlNetLoader", control_net_name="canny.safetensors"),
        _14=node("PrimitiveInt", value=7),
        _15=node("CLIPSetLastLayer", stop_at_clip_layer=-2, clip=["10", 1]),
        _6={"clip": ["15", 0], "text": ["16", 0]},
        _16=node("PrimitiveStringMultiline", value="from a node"),
        _5={"batch_size": 4},
        _17=node("ImageUpscaleWithModel", image=["8", 0]),
    ))  # fmt: skip
    assert (found.fields["seed"], found.fields["prompt"], found.model) == (7, "from a node", "v1-5-pruned-emaonly-fp16")
    assert found.loras == [Lora("ink", 0.7)] and found.enlarger is None
    assert list(map(str, found.controls)) == ["canny=PICTURE:0.5"]
    lines = told(found)
    for words in (
        "left out, without an equivalent here: 3 nodes of 15 that may change it",
        "one of a batch",
    ):  # fmt: skip
        assert words in lines, words


def test_comfyui_qwen_image_and_a_picture() -> None:
    found = read(prompt=graph(
        _3={"model": ["11", 0], "scheduler": "simple", "denoise": 0.6, "latent_image": ["12", 0]},
        _4=node("UNETLoader", unet_name="qwen_image_bf16.safetensors", weight_dtype="default"),
        _11=node("ModelSamplingAuraFlow", shift=3.1, model=["4", 0]),
        _12=node("VAEEncode", pixels=["13", 0], vae=["14", 0]),
        _13=node("LoadImage", image="in.png"), _14=node("VAELoader", vae_name="qwen_image_vae.safetensors"),
        _7=node("ConditioningZeroOut", conditioning=["6", 0]),
    ))  # fmt: skip
    assert found.fields["schedule"] == "model" and found.fields["strength"] == 0.6 and found.picture
    assert known_model(found.model or "") == "qwen-image" and found.fields["negative_prompt"] == ""
    assert "1 node of 11 that may change it" in told(found) and "own schedule is taken" in told(found)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"_10": node("KSampler", seed=1)}, "its samplers are KSampler, KSampler"),
        ({"_10": node("SamplerCustomAdvanced")}, "SamplerCustomAdvanced"),
        ({"_3": node("VAEDecode")}, "its samplers are none"),
        ({"_3": {"positive": ["99", 0]}}, "positive prompt comes from nowhere"),
        ({"_3": {"positive": []}}, "positive prompt comes from nowhere"),
        ({"_6": node("ConditioningCombine", conditioning_1=["7", 0])}, "comes from a ConditioningCombine node"),
        ({"_6": node("Loop", conditioning=["6", 0])}, "runs in a circle"),
        ({"_3": {"seed": ["10", 0]}, "_10": node("Loop", value=["10", 0])}, "its seed runs in a circle"),
        ({"_3": {"seed": ["4", 0]}}, "its seed comes from a CheckpointLoaderSimple node"),
        ({"_3": {"steps": [{}, 0]}}, "its steps comes from a missing node"),
    ],
)  # fmt: skip
def test_graphs_that_are_not_plain_say_why(changes: dict[str, Any], why: str) -> None:
    found = read(prompt=graph(**changes))
    assert found.refused is not None and why in found.refused, found.refused


@pytest.mark.parametrize(
    "text",
    [
        "{}", json.dumps({"1": 5}), json.dumps({"1": {"class_type": 3, "inputs": {}}}),
        json.dumps({"1": {"class_type": "KSampler", "inputs": []}}), graph(_3={"seed": "1"}), graph(_3={"seed": None,
        "steps": 1.5}),
        graph(_3={"cfg": "8"}), graph(_3={"sampler_name": 7}), graph(_3={"scheduler": {"a": 1}}),
        graph(_5={"width": 0}),
        graph(_6={"text": 5}), graph(_4={"ckpt_name": 5}), graph(_6={"text": "x" * 100_001}), graph(_3={"cfg": -1}),
        json.dumps({str(i): {"class_type": "x", "inputs": {}} for i in range(2_001)}),
        graph(_3={"is_changed": [float("nan")]}),
    ],
    ids=range(16),
)  # fmt: skip
def test_broken_graphs_are_one_line(text: str) -> None:
    refused(read_foreign, {"prompt": text}, PATH)


# Which program, and which model


def test_pictures_without_a_recipe_that_is_known() -> None:
    texts = {
        "prompt": "a cat",
        "Comment": "{}",
        "parameters": "no fields here",
        "UserComment": '{"a": 1}',
        "Software": "x",
    }
    assert read_foreign({}, PATH) is None and read_foreign(texts, PATH) is None
    assert RECIPE["prompt"] == "a red circle"


@pytest.mark.parametrize(
    "name", ["dreamshaper_8", "", "../x", "/etc/passwd", "C:\\models\\x", "a/b/c", "~/x", "x" * 500]
)
def test_names_that_are_no_model_here(name: str) -> None:
    found = Foreign(program="x", path=PATH)
    found.put_model(name)
    assert known_model(found.model or "") is None
    assert not set(found.model or "") & set("/\\")


def test_long_lists_are_cut_and_counted() -> None:
    line = ", ".join(f"Field {i}: {'v' * 300}" for i in range(150))
    lines = read(parameters=f"x\nSteps: 1, Seed: 1, Size: 8x8, RNG: CPU, {line}").messages()
    assert len(lines) == 1 and "and 130 more" in lines[0] and len(lines[0]) < 1_500


@pytest.mark.parametrize("name", ["a/b--c", "a--b/c", "a/b..c", "a../b", "-a/b", "a/b/c", "a/"])
def test_what_the_hub_calls_no_name_is_none_here(name: str) -> None:
    assert known_model(name) is None and known_model("owner/name-1.5_x") == "owner/name-1.5_x"
