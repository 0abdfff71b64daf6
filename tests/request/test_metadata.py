"""Recipes: written exactly, read strictly; the A1111 text against a reader of its grammar; the XMP mark."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from support.recipe_cases import PIXELS, RECIPE, recipe, recipe_from_png, saved

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import printable
from qwenimg.common.prompts.check import MAX_CHARACTERS as MAX_PROMPT
from qwenimg.common.request.recipe import XMP, a1111_parameters, check_recipe, model_label, png_text

CREATED = "2026-02-28T13:14:15+00:00"


# A1111


def read_a1111(text: str) -> tuple[str, str, dict[str, str]]:
    """Prompt, negative prompt and fields, as the grammar says: the last line is `Name: value, ...`, where a value
    with a comma, colon or newline is a JSON string."""
    *lines, last = text.split("\n")
    at = next((i for i, line in enumerate(lines) if line.startswith("Negative prompt: ")), len(lines))
    negative = "\n".join(lines[at:]).removeprefix("Negative prompt: ")
    fields = {}
    while last:
        name, _, last = last.partition(": ")
        if last.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(last)
            last = last[end:].removeprefix(", ")
        else:
            value, _, last = last.partition(", ")
        fields[name] = value
    return "\n".join(lines[:at]), negative, fields


def test_a1111_text() -> None:
    assert a1111_parameters(RECIPE) == (
        "a red circle\nSteps: 20, Sampler: Euler, Schedule type: Model, CFG scale: 4, Seed: 1, Size: 1328x1336, "
        "Model: Qwen/Qwen-Image, RNG: CPU, Version: qwenimg 0.1.0"
    )
    text = a1111_parameters(recipe(prompt="第一行\n第二行", negative_prompt="blurry, low", guidance=3.25))
    assert text.startswith("第一行\n第二行\nNegative prompt: blurry, low\nSteps: 20, ")
    assert "CFG scale: 3.25, " in text


@pytest.mark.parametrize("model", ["plain", "with, comma", 'quote " and: colon', "two\nlines", "模型,一"])
def test_a1111_values_are_quoted(model: str) -> None:
    prompt, negative, fields = read_a1111(a1111_parameters(recipe(model=model, negative_prompt="x, y\nz")))
    assert (prompt, negative) == ("a red circle", "x, y\nz")
    assert fields == {
        "Steps": "20", "Sampler": "Euler", "Schedule type": "Model",
        "CFG scale": "4", "Seed": "1", "Size": "1328x1336", "Model": model,
        "RNG": "CPU", "Version": "qwenimg 0.1.0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given_name", "label"),
    [
        ("Qwen/Qwen-Image", "Qwen/Qwen-Image"),
        ("tiny", "tiny"),
        ("/home/someone/models/qwen", "qwen"),
        ("/home/someone/models/qwen/", "qwen"),
        ("~/models/qwen.safetensors", "qwen.safetensors"),
        ("../qwen", "qwen"),
        ("models/a/b", "b"),
        ("C:\\Users\\someone\\qwen", "qwen"),
    ],
)
def test_no_local_path_gets_into_a_picture(given_name: str, label: str) -> None:
    assert model_label(given_name) == label
    text = png_text(recipe(model=given_name))
    assert json.loads(text["qwenimg"])["model"] == label
    assert "someone" not in text["parameters"] + text["qwenimg"]


# Round trip


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "一只猫,水彩\n第二行",
        "esc \x1b[31m nul \0 del \x7f tab \t cr \r bidi \u202e",
        "lone \udcff surrogate",
        "x\nNegative prompt: y\nSteps: 1, Seed: 666, Size: 8x8",
        "👩‍🚀" * (MAX_PROMPT // 3),
    ],
)
def test_round_trip_is_exact(tmp_path: Path, prompt: str) -> None:
    told = recipe(prompt=prompt, negative_prompt=prompt[::-1], created=CREATED, warnings=["blank"], seed=2**64 - 1)
    assert recipe_from_png(saved(tmp_path / "x.png", png_text(told))) == told


@given(prompt=st.text(alphabet=st.characters(exclude_categories=[])), guidance=st.floats(0, 100))
def test_any_prompt_round_trips(tmp_path_factory: pytest.TempPathFactory, prompt: str, guidance: float) -> None:
    told = recipe(prompt=prompt, guidance=guidance)
    assert recipe_from_png(saved(tmp_path_factory.getbasetemp() / "r.png", png_text(told))) == told


def test_a_prompt_that_is_too_long_is_written_but_not_run_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.png", png_text(recipe(prompt="cat" * 1_000_000)))
    with pytest.raises(ModelError, match="prompt: expected a text of at most 100,000"):
        recipe_from_png(path)


def test_xmp_says_that_a_trained_model_made_it(tmp_path: Path) -> None:
    description = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}Description"
    kind = "{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}DigitalSourceType"
    found = ET.fromstring(XMP).find(f".//{description}/{kind}")
    assert found is not None and found.text is not None
    assert found.text.endswith("cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia")
    assert len(XMP.encode()) < 1100
    with Image.open(saved(tmp_path / "x.png", {})) as picture:
        assert picture.info["XML:com.adobe.xmp"] == XMP and picture.info["xmp"] == XMP.encode()


# Foreign and hostile recipes


def refused(tmp_path: Path, text: dict[str, str]) -> str:
    with pytest.raises(ModelError) as caught:
        recipe_from_png(saved(tmp_path / "x.png", text))
    message = str(caught.value)
    print(message)
    assert "x.png" in message and message.isprintable() and len(message) <= 300
    return message


def test_other_peoples_pictures_have_no_recipe(tmp_path: Path) -> None:
    a1111 = {"parameters": "a cat\nSteps: 1, Sampler: Euler, Seed: 666, Size: 8x8, Model: x"}
    assert "has no recipe" in refused(tmp_path, a1111)
    assert "has no recipe" in refused(tmp_path, {"prompt": "{}", "workflow": json.dumps({"seed": 1})})


def test_newer_format(tmp_path: Path) -> None:
    newer = json.dumps({**RECIPE, "format": 2, "loras": []})
    assert "made by a newer version of qwenimg (recipe format 2" in refused(tmp_path, {"qwenimg": newer})


BAD_VALUES: list[tuple[str, object]] = [
    ("format", 0), ("format", True), ("format", 1.0), ("format", "1"), ("version", None), ("model", 3),
    ("backend", "b" * 3000), ("device", []), ("rng", {}), ("prompt", 1), ("prompt", "p" * (MAX_PROMPT + 1)),
    ("negative_prompt", None), ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("seed", True), ("seed", "1"),
    ("width", 0), ("width", 10**9), ("height", -8), ("height", 8.5), ("steps", 0), ("steps", 10**9), ("steps", None),
    ("guidance", -1), ("guidance", 1e9), ("guidance", 10**19), ("guidance", "4"), ("guidance", True),
    ("sampler", ["euler"]), ("sigmas_sha256", "0A" * 32), ("noise_sha256", "00" * 31), ("noise_sha256", 0),
    ("tf32", 0), ("tf32", "false"), ("warnings", "none"), ("warnings", [1]), ("warnings", ["w"] * 300),
    ("precision", []), ("precision", {"vae": 1}), ("versions", {"torch": None}), ("versions", "2"),
    ("prediction", "x"), ("prediction", "V"), ("prediction", 1),
    ("created", "yesterday"), ("created", 5), ("created", None), ("unknown", 1), ("\x1b[31m", 1),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_bad_values_are_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    message = refused(tmp_path, {"qwenimg": json.dumps({**RECIPE, key: value})})
    assert key in message or "\\x1b" in message


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize("side", [1, 16_384])
@pytest.mark.parametrize("steps", [1, 1000])
@pytest.mark.parametrize("guidance", [0.0, 100.0])
def test_bounds_are_inclusive(seed: int, side: int, steps: int, guidance: float) -> None:
    told = recipe(seed=seed, width=side, height=side, steps=steps, guidance=guidance)
    assert check_recipe(told, Path("x.png")) == told


@pytest.mark.parametrize("key", sorted(RECIPE))
def test_missing_keys_are_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=f"no {key}|`format`"):
        check_recipe({k: v for k, v in RECIPE.items() if k != key}, Path("x.png"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '"x"',
        "{",
        "[" * 200_000,
        '{"a":' * 100_000,
        "[" + "[]," * 900_000 + "[]]",
        '{"format": 1, "format": 1}',
        '{"format": ' + "9" * 5000 + "}",
        '{"format": 99999999999999999999}',
        json.dumps({**RECIPE, "guidance": float("nan")}),
        json.dumps({**RECIPE, "guidance": 4}).replace('"guidance": 4', '"guidance": 1e999'),
        " " * 5_000_001,
    ],
    ids=lambda text: text[:20],
)
def test_hostile_json_is_one_line(tmp_path: Path, text: str) -> None:
    refused(tmp_path, {"qwenimg": text})


def test_an_international_text_recipe_is_read_too(tmp_path: Path) -> None:
    chunk = PngImagePlugin.PngInfo()
    chunk.add_itxt("qwenimg", json.dumps({**RECIPE, "prompt": "猫"}, ensure_ascii=False), zip=True)
    Image.fromarray(PIXELS).save(tmp_path / "x.png", pnginfo=chunk)
    assert recipe_from_png(tmp_path / "x.png")["prompt"] == "猫"


def test_whole_guidance_is_a_float() -> None:
    assert type(check_recipe(recipe(guidance=4), Path("x.png"))["guidance"]) is float


# Printing


def test_printable() -> None:
    assert printable("a\nb 猫 é \u3000👩‍🚀") == "a\nb 猫 é \u3000👩‍🚀"
    assert printable("\x1b[2J\0\r\t\x7f\x9b\u202e\u2066\u2028\ufeff\udcff\x85") == (
        "\\x1b[2J\\x00\\r\\t\\x7f\\x9b\\u202e\\u2066\\u2028\\ufeff\\udcff\\x85"
    )


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_printable_has_no_control_character(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\u200c\u200d" or c.isspace() for c in shown)
    assert not set(shown) & (set(map(chr, range(32))) - {"\n"} | set(map(chr, range(127, 160))))
    assert shown.encode("utf-8").decode() == shown
