"""Pictures and LoRAs in every form that a call from Python takes: all forms of one thing draw the same picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.lora_cases import write_lora

import qwenimg
from qwenimg import ModelError, Pipeline, QwenimgError, UsageError
from qwenimg.common.numbers.noise import sha256
from qwenimg.common.pictures.pixels import over_white
from qwenimg.common.request import lora_text

SMALL: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "seed": 7, "strength": 0.5}
PIXELS = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
HALF = np.repeat(np.array([0, 255], np.uint8), 16)[None].repeat(32, 0)


@pytest.fixture(scope="module", params=["cpu", "mlx"])
def pipe(request: pytest.FixtureRequest, tiny_folder: Path) -> Pipeline:
    return qwenimg.load(tiny_folder, backend=request.param, precision="fp32")


@pytest.mark.sample(1)
def test_a_picture_may_be_an_array_an_image_or_a_file(pipe: Pipeline, tmp_path: Path) -> None:
    file, mask = tmp_path / "in.png", tmp_path / "mask.png"
    Image.fromarray(PIXELS).save(file)
    Image.fromarray(HALF).save(mask)
    asked: dict[str, Any] = {"prompt": "a ring", **SMALL}
    expected = pipe(**asked, image=PIXELS, mask=HALF)
    for image in (Image.fromarray(PIXELS), Image.open(file), file, str(file)):
        for piece in (Image.fromarray(HALF), mask, str(mask)):
            drawn = pipe(**asked, image=image, mask=piece)
            assert drawn.latents.tobytes() == expected.latents.tobytes()
            assert drawn.recipe == expected.recipe | {"created": drawn.recipe["created"]} and not drawn.warnings
    assert pipe.estimate(**asked, image=file) == pipe.estimate(**asked, image=PIXELS)


def test_a_result_starts_the_next_picture(pipe: Pipeline) -> None:
    first = pipe("a ring", **SMALL | {"strength": None})
    by_image, by_pixels = (pipe("a ring", **SMALL, image=image) for image in (first.images[0], first.pixels))
    assert by_image.latents.tobytes() == by_pixels.latents.tobytes()
    assert by_image.latents.tobytes() != first.latents.tobytes()


def test_an_image_of_another_mode_is_converted_and_that_is_told(pipe: Pipeline) -> None:
    grey = Image.fromarray(PIXELS).convert("L")
    told = pipe("a ring", **SMALL, image=grey)
    assert told.warnings == ["image is grey, taken as RGB"]
    same = np.asarray(grey.convert("RGB"))
    assert told.latents.tobytes() == pipe("a ring", **SMALL, image=same).latents.tobytes()
    layer = np.dstack([PIXELS, HALF])
    seen = pipe("a ring", **SMALL, image=layer)
    assert seen.warnings == ["image is transparent in parts; they are taken as white"]
    white = pipe("a ring", **SMALL, image=over_white(layer))
    assert seen.latents.tobytes() == white.latents.tobytes() and white.warnings == []
    assert seen.recipe["image_sha256"] == white.recipe["image_sha256"] == sha256(over_white(layer))
    masked = pipe("a ring", **SMALL, image=PIXELS, mask=Image.fromarray(HALF).convert("RGB"))
    assert masked.warnings == ["mask is taken as grey"]


@pytest.mark.parametrize(
    ("asked", "kind", "told"),
    [
        ({"image": 5}, UsageError, "image is int; expected a PIL image, a uint8 array or the path of a file"),
        ({"image": b"in.png"}, UsageError, "image is bytes; expected a PIL image"),
        ({"image": [[0]]}, UsageError, "image is list"),
        ({"image": Image.new("RGB", (0, 5))}, UsageError, "image is 0x5; expected at least one pixel"),
        ({"image": Image.new("L", (40_000, 1))}, UsageError, "image is 40000x1; expected"),
        ({"image": "no such.png"}, ModelError, "no such.png"),
        ({"mask": "in.png"}, UsageError, "a mask needs the image that it belongs to"),
        ({"mask": Image.new("L", (8, 8))}, UsageError, "a mask needs the image"),
        ({"image": PIXELS, "mask": 1.5}, UsageError, "mask is float; expected a PIL image"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_picture_is_one_line(pipe: Pipeline, asked: Any, kind: type[QwenimgError], told: str) -> None:
    for call in (pipe, pipe.check, pipe.estimate):
        with pytest.raises(kind, match=re.escape(told)) as caught:
            call("a ring", width=32, height=32, steps=1, **asked)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_a_picture_that_is_broken_inside_is_one_line(pipe: Pipeline, tmp_path: Path) -> None:
    """It was opened, which reads its header alone."""
    file = tmp_path / "cut.png"
    Image.fromarray(PIXELS).save(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UsageError, match="image is a PIL image that cannot be read"):
        pipe("a ring", **SMALL, image=Image.open(file))


# LoRAs


@pytest.mark.sample(0)
def test_a_lora_may_be_a_text_a_path_or_a_pair(pipe: Pipeline, tiny_folder: Path, tmp_path: Path) -> None:
    one, two = (write_lora(tiny_folder, "qwen", tmp_path / f"{i}.safetensors", 10 * i) for i in (1, 2))
    asked: dict[str, Any] = {"prompt": "a ring", **SMALL | {"strength": None}}
    full, weak = pipe(**asked, lora=str(one)), pipe(**asked, lora=f"{one}:0.5")
    both = pipe(**asked, lora=f"{one}:0.5; {two}")
    assert len({each.latents.tobytes() for each in (full, weak, both, pipe(**asked))}) == 4
    ways: list[tuple[Any, Any]] = [
        (one, full), ([one], full), ((one, 1), full), ((str(one), 1.0), full),
        ((one, 0.5), weak), ([(str(one), np.float32(0.5))], weak), (((one, 0.5),), weak),
        ([(one, 0.5), two], both), ((f"{one}:0.5", two), both), ([f"{one}:0.5", (two, 1)], both),
    ]  # fmt: skip
    for way, expected in ways:
        drawn = pipe(**asked, lora=way)
        assert drawn.latents.tobytes() == expected.latents.tobytes(), way
        assert drawn.recipe == expected.recipe | {"created": drawn.recipe["created"]}
    assert pipe(**asked, lora=[]).latents.tobytes() == pipe(**asked).latents.tobytes()


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (5, "lora has int; expected FILE, FILE:SCALE, a path, or a pair (path, strength)"),
        ([None], "lora has NoneType"),
        ({"a": 1}, "lora has dict"),
        (["a", 0.7], "lora has float"),
        (("a", None), "the strength of lora a is 'None'; expected a number"),
        (("a", True), "the strength of lora a is 'True'; expected a number"),
        (("a", float("nan")), "a strength is a finite number"),
        (("a", 10**400), "expected a number"),
        ((b"a", 0.7), "lora has tuple"),
        (("a", 0.7, 1), "lora has float"),
        ((Path("a;b"), 0.7), "a semicolon parts LoRAs"),
    ],
    ids=str,
)
def test_what_is_no_lora_is_one_line(lora: Any, told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as caught:
        lora_text.parse(lora)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200
