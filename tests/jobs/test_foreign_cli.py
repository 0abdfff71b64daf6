"""`info` and `--from` on pictures of other programs, from PNG, JPEG and WebP."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support.cli_runner import Library, cli
from support.encoded import commented, jpeg
from support.foreign_cases import COMFYUI, INVOKEAI, MFLUX, graph, node

from qwenimg.common.hub import resolve

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
    """No model of these recipes is on this machine."""
    monkeypatch.setattr(resolve, "named", lambda name, **_: name)


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
    assert cli("--from", png("i.png", invokeai_metadata=json.dumps(invokeai)), "-o", "j").code == 0
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
