"""`info` and `--from` on pictures of other programs, from PNG, JPEG and WebP."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.numpy import save_file
from support.cli_runner import Library, cli
from support.encoded import commented, jpeg
from support.foreign_cases import COMFYUI, INVOKEAI, MFLUX, PAGE, graph, node

from qwenimg.common.hub import missing, resolve
from qwenimg.common.jobs.replay import read_replay

KNOWN = (
    "a cat\nNegative prompt: ugly\nSteps: 4, Sampler: Euler, CFG scale: 5, Seed: 7, Size: 9x7, Model: sdxl, RNG: CPU"
)


def png(name: str, **texts: str) -> str:
    info = PngInfo()
    for key, text in texts.items():
        info.add_text(key, text)
    Image.new("RGB", (3, 4)).save(name, pnginfo=info)
    return name


def with_comment(name: str, comment: bytes) -> str:
    """A picture of the format that `name` ends in, whose EXIF UserComment is `comment`."""
    Image.new("RGB", (3, 4)).save(name, exif=b"Exif\0\0" + commented(comment))
    return name


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model of these recipes is on this machine, nor a file of the LoRAs and networks that are given."""
    monkeypatch.setattr(resolve, "named", lambda name, **_: name)
    monkeypatch.setattr(missing, "check", lambda *given, **more: None)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_a1111_is_made_again(library: Library, name: str) -> None:
    source = (
        png(name, parameters=KNOWN) if name == "a.png" else with_comment(name, b"UNICODE\0" + KNOWN.encode("utf-16-be"))
    )
    ran = cli("--from", source, "-o", "b")
    assert ran.code == 0 and "warning: AUTOMATIC1111" not in ran.err, ran.err
    [row] = library.asked
    assert (row["prompt"], row["negative_prompt"], row["seed"], row["steps"]) == ("a cat", "ugly", 7, 4)
    assert (row["width"], row["height"], row["guidance"]) == (9, 7, 5.0) and library.calls[0]["model"] == "sdxl"
    again = cli("--from", source, "-o", "c", "-m", "mine", "--steps", "2", "-s", "1")
    assert again.code == 0 and library.calls[1]["model"] == "mine"
    assert (library.asked[0]["steps"], library.asked[0]["seed"]) == (2, 1)


def test_what_is_left_out_is_told_before_the_picture(library: Library) -> None:
    text = KNOWN.replace(", RNG: CPU", ", Hires CFG Scale: 2, ENSD: 31337").replace("a cat", "a cat <lora:x\x1b[2J:1>")
    ran = cli("--from", png("a.png", parameters=text), "-o", "b", "--quiet")
    assert ran.code == 0 and library.asked[0]["prompt"] == "a cat" and "\x1b" not in ran.err
    lines = [line for line in ran.err.splitlines() if "AUTOMATIC1111" in line]
    assert len(lines) == 2 and "Hires CFG Scale 2; ENSD 31337" in lines[0] and "on a GPU" in lines[1]
    assert all(line.startswith("qwenimg: warning: ") for line in lines)


def test_mflux_and_invokeai_are_made_again(library: Library) -> None:
    mflux = {**MFLUX, "width": 10, "height": 8, "steps": 2}
    for name in ("m.png", "m.jpg", "m.webp"):
        with_comment(name, b"ASCII\0\0\0" + json.dumps(mflux, ensure_ascii=False).encode())
        assert cli("--from", name, "-o", name + ".png").code == 0
        assert library.asked[0]["prompt"] == mflux["prompt"] and library.calls[-1]["model"] == "qwen-image"
    invokeai = {**INVOKEAI, "width": 10, "height": 8, "steps": 2}
    again = ("--from", png("i.png", invokeai_metadata=json.dumps(invokeai)), "-o", "j")
    cli(*again).refused(2, "--control canny=PICTURE")
    ran = cli(*again, "--control", "canny=i.png:0.5")
    assert ran.code == 0 and "left out unless given by --lora: ink:0.7" in ran.err
    assert library.asked[0]["prompt"] == "landscape" and library.calls[-1]["model"] == "sdxl"


def test_comfyui_is_made_again_or_says_why_not(library: Library) -> None:
    plain = graph(_5={"width": 9, "height": 7}, _3={"steps": 2})
    assert cli("--from", png("a.png", prompt=plain, workflow="{}"), "-o", "b").code == 0
    assert library.asked[0]["seed"] == 156680208700286 and library.calls[0]["model"] == "sd15"
    twice = png("c.png", prompt=graph(_10=node("KSampler", seed=1)))
    cli("--from", twice).refused(5, "c.png", "ComfyUI", "one KSampler")
    shown = cli("info", twice)
    assert shown.code == 0 and "cannot be made again: its samplers are KSampler, KSampler" in shown.out.decode()


@pytest.mark.parametrize("model", ["dreamshaper_8", "/etc/passwd", "../folder", "known/here"])
def test_a_foreign_model_name_is_never_a_path(library: Library, model: str) -> None:
    Path("folder").mkdir()
    Path("known/here").mkdir(parents=True)
    Path("dreamshaper_8").mkdir()
    source = png("a.png", parameters=KNOWN.replace("sdxl", model))
    cli("--from", source, "-o", "b").refused(5, "--from", "-m")
    assert not library.calls
    assert cli("--from", source, "-o", "b", "-m", "mine").code == 0


def test_a_folder_that_is_called_like_the_model_is_not_opened(library: Library) -> None:
    Path("sdxl").mkdir()
    cli("--from", png("a.png", parameters=KNOWN), "-o", "b").refused(5, "'sdxl'", "-m")
    cli("--from", png("b.png", parameters=KNOWN.replace("Model: sdxl, ", "")), "-o", "c").refused(5, "names no model")


def test_pictures_that_were_started_from_need_to_be_given(library: Library) -> None:
    source = png("a.png", parameters=KNOWN + ", Denoising strength: 0.5")
    cli("--from", source, "-o", "b").refused(2, "-i")
    assert cli("--from", source, "-o", "b", "-i", "a.png").code == 0


def test_info_of_other_programs(library: Library) -> None:
    ran = cli("info", png("a.png", parameters=KNOWN + ", ENSD: 1"))
    lines = ran.out.decode().splitlines()
    assert ran.code == 0 and "recipe of: AUTOMATIC1111" in lines and "seed: 7" in lines and "model: sdxl" in lines
    assert any(line.startswith("note: ") and "ENSD 1" in line for line in lines)
    data = json.loads(cli("info", "a.png", "--json").out)
    assert data["recipe"] is None and data["foreign"]["fields"]["seed"] == 7 and data["foreign"]["refused"] is None
    assert json.loads(cli("info", png("p.png"), "--json").out)["foreign"] is None
    ours = cli("x", "-o", "o.webp")
    assert json.loads(cli("info", str(ours.paths[0]), "--json").out)["foreign"] is None


def test_broken_recipes_are_one_line(library: Library) -> None:
    sources = [
        png("a.png", parameters=KNOWN.replace("Seed: 7", f"Seed: {'7' * 5_000}")),
        png("b.png", invokeai_metadata="[" * 200_000),
        png("c.png", prompt=json.dumps({**COMFYUI, "3": 5})),
        with_comment("d.jpg", b"ASCII\0\0\0" + json.dumps({**MFLUX, "seed": "x"}).encode()),
        with_comment("e.webp", b"ASCII\0\0\0\xff\xfe"),
    ]
    Path("f.jpg").write_bytes(jpeg((0xE1, b"Exif\0\0XX")))
    Path("g.webp").write_bytes(b"RIFF\0\0\0\0WEBPEXIF\xff\xff\xff\x00")
    for source in (*sources, "f.jpg", "g.webp"):
        cli("info", source).refused(5, source)
        cli("--from", source).refused(5, source)


def test_a_plain_photograph_has_no_recipe(library: Library) -> None:
    out = io.BytesIO()
    Image.new("RGB", (3, 4)).save(out, "JPEG")
    Path("a.jpg").write_bytes(out.getvalue())
    cli("--from", "a.jpg").refused(5, "no recipe")
    assert cli("info", "a.jpg").out.decode().splitlines()[0] == "no recipe of qwenimg"


# LoRAs, control networks and upscalers by name, and workflows as files


def test_loras_are_found_by_name_and_looked_at(library: Library) -> None:
    Path("models/loras/deep").mkdir(parents=True)
    file = Path("models/loras/deep/ink.safetensors")
    save_file({"a.lora_A.weight": np.zeros((2, 2), np.float32)}, file)
    start = hashlib.sha256(file.read_bytes()[8 + int.from_bytes(file.read_bytes()[:8], "little") :]).hexdigest()[:12]
    known = KNOWN.replace("a cat", "a cat <lora:ink:0.8> <lora:gone:1>")
    source = png("a.png", parameters=f'{known}, Lora hashes: "ink: {start}, gone: 0011223344"')
    ran = cli("--from", source, "-o", "b", "--models-dir", "models")
    assert ran.code == 0 and [str(one) for one in library.asked[0]["lora"]] == [f"{file.absolute()}:0.8"]
    assert "qwenimg: warning: --from: not here, and left out unless given by --lora: gone\n" in ran.err
    other = png("c.png", parameters=f'{known}, Lora hashes: "ink: ffffffffffff"')
    ran = cli("--from", other, "-o", "d", "--models-dir", "models")
    assert ran.code == 0 and "other data than the picture's (ffffffffffff)" in ran.err
    ran = cli("--from", source, "-o", "e", "--lora", "mine.safetensors:0.1")
    assert ran.code == 0 and [str(one) for one in library.asked[0]["lora"]] == ["mine.safetensors:0.1"]
    assert "not here" not in ran.err
    assert cli("--from", source, "-o", "f").code == 0 and "lora" not in library.asked[0]


def test_control_asks_for_its_pictures_by_names_that_are_here(library: Library) -> None:
    unit = '"Module: canny, Model: {} [d14c016b], Weight: 0.8, Guidance Start: 0, Guidance End: 0.7, Control Mode: 2"'
    source = png("a.png", parameters=f"{KNOWN}, ControlNet 0: {unit.format('control_v11p_sd15_canny_fp16')}")
    again = ("--from", source, "-o", "b")
    cli(*again).refused(2, "--control sd15-controlnet-canny=canny@PICTURE:0.8:0-0.7")
    Path("models/controlnet").mkdir(parents=True)
    Path("models/controlnet/control_v11p_sd15_canny_fp16.safetensors").touch()
    cli(*again, "--models-dir", "models").refused(2, "--control control_v11p_sd15_canny_fp16=canny@PICTURE:0.8:0-0.7")
    assert cli(*again, "--control", "x=a.png:0.8").code == 0
    assert read_replay(Path(source)).options["control_mode"] == "control"
    adapter = KNOWN + ', ControlNet 0: "Module: ip-adapter-auto, Model: ip-adapter-plus_sd15 [6a3f6166], Weight: 0.5"'
    cli("--from", png("c.png", parameters=adapter), "-o", "d").refused(2, "--control ip-adapter-plus_sd15=PICTURE:0.5")
    hostile = KNOWN + ', ControlNet 0: "Module: none, Model: $(touch pwned) x, Weight: 0.5"'
    cli("--from", png("e.png", parameters=hostile), "-o", "f").refused(2, "--control '$(touch pwned) x=PICTURE:0.5'")
    many = ", ".join(f'ControlNet {i}: "Module: none, Model: {"n" * 200}{i}"' for i in range(8))
    cli("--from", png("g.png", parameters=f"{KNOWN}, {many}"), "-o", "h").refused(2, "--control")


def test_an_upscaler_is_found_by_name(library: Library) -> None:
    text = f"{KNOWN}, Postprocess upscale by: 2, Postprocess upscaler: 4x-UltraSharp"
    ran = cli("--from", png("a.png", parameters=text), "-o", "b")
    assert ran.code == 0 and "4x-UltraSharp made it 2 times as large, and is not here" in ran.err
    Path("models/upscale_models").mkdir(parents=True)
    Path("models/upscale_models/4x-UltraSharp.pth").write_bytes(b"no network")
    cli("--from", "a.png", "-o", "c", "--models-dir", "models").refused(5, "4x-UltraSharp.pth")


def test_a_workflow_draws_and_info_names_the_command(library: Library) -> None:
    api = graph(_5={"width": 9, "height": 7}, _3={"steps": 2})
    Path("api.json").write_text(api)
    ran = cli("--from", "api.json", "-o", "b")
    assert ran.code == 0 and library.asked[0]["seed"] == 156680208700286 and library.calls[0]["model"] == "sd15"
    assert cli("info", "api.json").out.decode().splitlines()[-1] == "use it: qwenimg --from api.json"
    Path("page.json").write_text(json.dumps(PAGE))
    needs = "--control ip-adapter-plus_sd15=PICTURE:0.8 --control sd15-controlnet-canny=canny@PICTURE:0.7"
    cli("--from", "page.json", "-o", "c").refused(2, needs)
    lines = cli("info", "page.json").out.decode().splitlines()
    print("\n".join(lines))
    assert lines[0] == "layout: a workflow of ComfyUI" and lines[-1].startswith(
        "use it: qwenimg --from page.json --control"
    )
    assert "seed: 27" in lines and "lora: ink:0.6" in lines and "model: v1-5-pruned-emaonly" in lines
    pictures = ("--control", "ip-adapter-plus_sd15=b.png:0.8", "--control", "sd15-controlnet-canny=canny@b.png:0.7")
    ran = cli("--from", "page.json", "-o", "c", *pictures)
    assert ran.code == 0 and library.asked[0]["prompt"] == "a girl with a necklace", ran.err
    Path("twice.json").write_text(graph(_10=node("KSampler", seed=1)))
    cli("--from", "twice.json").refused(5, "twice.json", "one KSampler")
    assert (
        cli("info", "twice.json")
        .out.decode()
        .splitlines()[-1]
        .startswith("not used here: not plain enough: its samplers")
    )


def test_files_that_are_no_workflow(library: Library) -> None:
    Path("a.json").write_text('{"prompt": "x"}')
    cli("--from", "a.json").refused(5, "a.json", "no workflow of ComfyUI")
    Path("b.json").write_text("[1]")
    cli("--from", "b.json").refused(5, "b.json", "is no PNG")
    Path("c.json").mkdir()
    cli("--from", "c.json").refused(5, "c.json", "folder")
    os.mkfifo("d.json")
    cli("--from", "d.json").refused(5, "d.json", "pipe")
    Path("e.json").symlink_to("e.json")
    cli("--from", "e.json").refused(5, "e.json")
    Path("f.json").write_bytes(b"{" + b" " * 5_000_000)
    cli("--from", "f.json").refused(5, "f.json", "5,000,000 are read")
    Path("g.json").write_bytes(b"")
    cli("--from", "g.json").refused(5, "g.json")
