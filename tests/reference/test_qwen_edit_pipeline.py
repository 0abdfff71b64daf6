"""Qwen-Image-Edit, -2509 and -2511 from a prompt and pictures to pixels, on both backends, against diffusers on folders
that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_edit, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image import references
from qwenimg.common.numbers import noise, sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.picture_texts import PicturePrompt

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured 5e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which each input must move some pixel: a fault in it would show

RNG = np.random.default_rng(11)
WIDE, HIGH, SMALL = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((300, 500), (333, 222), (64, 80)))
CASES = [
    # kind, prompt, negative prompt, pictures, width, height, steps, guidance
    ("qwen-edit", "make it red", "blue circles on a sheet", [WIDE], 80, 48, 3, 4.0),
    ("qwen-edit", "一个红色的圆在左边", " ", [SMALL], 48, 112, 2, 2.5),
    ("qwen-2509", "the star of Picture 2 in Picture 1", " ", [WIDE, HIGH], 80, 48, 3, 4.0),
    ("qwen-2509", "a ring", "x", [HIGH], 64, 64, 2, 1.0),
    ("qwen-2511", "the star of Picture 2 in Picture 1", "a long text that nobody wants", [HIGH, WIDE], 80, 48, 3, 4.0),
    ("qwen-2511", "a ring", " ", [SMALL, WIDE, HIGH], 48, 80, 2, 3.0),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_edit.make_pictures_small(monkeypatch)


@pytest.fixture(scope="module")
def opened(tiny_edit: dict[str, Path]) -> Callable[[str, str], Pipeline]:
    pipes: dict[tuple[str, str], Pipeline] = {}

    def one(kind: str, backend: str) -> Pipeline:
        if (kind, backend) not in pipes:
            pipes[kind, backend] = qwenimg.load(tiny_edit[kind], backend=backend, precision="fp32")
        return pipes[kind, backend]

    return one


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{len(case[3])}-{case[4]}x{case[5]}-{case[7]}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_edit: dict[str, Path], opened: Callable[[str, str], Pipeline], case: Any) -> None:
    kind, prompt, negative, pictures, width, height, steps, guidance = case
    initial = noise.normal((1, 16, height // 8, width // 8), seed=7)
    latents, pixels = oracle_edit.generate(
        tiny_edit[kind], prompt, pictures, initial, negative_prompt=negative, steps=steps, guidance=guidance
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "negative_prompt": negative}
    for backend in BACKENDS:
        ours = opened(kind, backend)(prompt, image=pictures, seed=7, **asked)
        peer.check_picture(f"{backend} {kind} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


ASKED: dict[str, Any] = {"width": 80, "height": 48, "steps": 2, "guidance": 4.0, "seed": 7}


@pytest.mark.sample(0)
def test_each_input_moves_the_picture(opened: Callable[[str, str], Pipeline]) -> None:
    pipe = opened("qwen-2511", "cpu")
    usual = pipe("make it red", image=[WIDE, HIGH], negative_prompt="a ring", **ASKED).pixels.astype(int)
    others = {
        "prompt": pipe("make it blue", image=[WIDE, HIGH], negative_prompt="a ring", **ASKED),
        "negative": pipe("make it red", image=[WIDE, HIGH], negative_prompt="a star", **ASKED),
        "second picture": pipe("make it red", image=[WIDE, SMALL], negative_prompt="a ring", **ASKED),
        "order": pipe("make it red", image=[HIGH, WIDE], negative_prompt="a ring", **ASKED),
        "no second picture": pipe("make it red", image=WIDE, negative_prompt="a ring", **ASKED),
    }
    moved = {name: np.abs(result.pixels - usual).max() for name, result in others.items()}
    print(moved)
    assert min(moved.values()) > MOVES


# Sizes


@pytest.mark.parametrize("size", [(1664, 928), (4, 3), (3, 1), (1, 3), (1000, 1001), (17, 2000), (500, 300)])
def test_sizes_are_those_of_diffusers(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]) -> None:
    monkeypatch.undo()
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for area in (384**2, 640**2, 1024**2):
        assert sizes.of_area(area, *size) == calculate_dimensions(area, size[0] / size[1])


def test_golden_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    golden = {(1664, 928): [(512, 288), (864, 480), (1376, 768)], (4, 3): [(448, 320), (736, 544), (1184, 896)]}
    for size, expected in golden.items():
        assert [sizes.of_area(side**2, *size) for side in (384, 640, 1024)] == expected


def test_size_is_that_of_the_last_picture(monkeypatch: pytest.MonkeyPatch, tiny_edit: dict[str, Path]) -> None:
    """A picture's own size in the model does not depend on that of the result."""
    monkeypatch.undo()
    pipe = qwenimg.load(tiny_edit["qwen-2509"], backend="cpu", precision="fp32")
    asked = pipe.check("a ring", image=[WIDE, HIGH])
    assert (asked.width, asked.height) == sizes.of_area(1024**2, 222, 333) == (832, 1248)
    asked = pipe.check("a ring", image=[HIGH, WIDE], width=64)
    assert (asked.width, asked.height) == (64, 38)
    for width, height in ((64, 64), (512, 256)):
        shapes = pipe.model.reference_shapes(pipe.check("a ring", image=[WIDE], width=width, height=height))
        assert shapes == [LatentShape(1, 800 // 8, 1312 // 8)]


def test_narrow_pictures_are_refused(opened: Callable[[str, str], Pipeline]) -> None:
    for picture in (np.zeros((1, 4000, 3), np.uint8), np.zeros((4001, 20, 3), np.uint8)):
        with pytest.raises(UsageError, match="too narrow: one side may be 200 times the other"):
            opened("qwen-2509", "cpu").check("a ring", image=picture, width=64, height=64)


# Pictures of a request


def test_a_model_that_edits_needs_a_picture(opened: Callable[[str, str], Pipeline]) -> None:
    with pytest.raises(UsageError, match=r"needs a picture: give it, as in qwenimg PROMPT -i PICTURE -m "):
        opened("qwen-2511", "cpu").check("a ring")


def test_how_many_pictures(opened: Callable[[str, str], Pipeline], tiny_folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"2 pictures .* takes one; several are for qwen-image-edit-2511 and -2509, qwen-image-2.1"
    ):
        opened("qwen-edit", "cpu").check("a ring", image=[SMALL, SMALL])
    with pytest.raises(UsageError, match=r"11 pictures are given, .* takes at most 10"):
        opened("qwen-2511", "cpu").check("a ring", image=[SMALL] * 11)
    with pytest.raises(UsageError, match=r"2 pictures are given, .* takes one"):
        qwenimg.load(tiny_folder, backend="cpu", precision="fp32").check("a ring", image=[SMALL, SMALL])


def test_many_pictures_are_warned_about(opened: Callable[[str, str], Pipeline]) -> None:
    result = opened("qwen-2509", "cpu")("a ring", image=[SMALL] * 4, width=48, height=48, steps=1, seed=1)
    assert "4 pictures are given: the model was trained with at most 3" in result.warnings
    assert len(result.recipe["more_images_sha256"]) == 3 and result.recipe["image_sha256"] == noise.sha256(SMALL)


def test_a_prompt_that_stands_for_a_picture_is_refused(opened: Callable[[str, str], Pipeline]) -> None:
    with pytest.raises(UsageError, match="stands for a picture: leave it out"):
        opened("qwen-2509", "cpu")("a <|image_pad|> ring", image=SMALL, width=48, height=48, steps=1)


# Text states


def test_states_are_kept_by_the_pictures_hash(opened: Callable[[str, str], Pipeline]) -> None:
    """An equal copy of a picture is the same; another one, or one of another shape, is not."""
    model = opened("qwen-2511", "cpu").model
    model.forget()
    one, equal, other = (model.prompt("a ring", [picture]) for picture in (SMALL, SMALL.copy(), SMALL[::-1]))
    turned = model.prompt("a ring", [SMALL.reshape(80, 64, 3)])
    assert isinstance(one, PicturePrompt) and one == equal and len({one, other, turned}) == 3
    model.texts.arrays([one])
    assert model.texts.has([equal]) and not model.texts.has([other])


@pytest.mark.sample(0)
def test_states_on_disk(tiny_edit: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drawn = []
    for _ in range(2):
        with qwenimg.load(tiny_edit["qwen-2509"], backend="cpu", precision="fp32", cache_prompts=True) as pipe:
            drawn.append(pipe("a ring", image=[SMALL, HIGH], **ASKED))
            assert not pipe.model.texts.has(pipe.model.prompts(pipe.check("a ring", image=[HIGH, SMALL])))
    assert np.array_equal(drawn[0].latents, drawn[1].latents)
    assert "encode" in drawn[0].timing and "encode" not in drawn[1].timing


# From the picture


@pytest.mark.sample(0)
def test_inpainting_equals_diffusers(tiny_edit: dict[str, Path], opened: Callable[[str, str], Pipeline]) -> None:
    width, height = sizes.of_area(references.AREA, 300, 200)
    picture = np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    mask[16:64, 32:112] = 255
    latents = oracle_edit.inpaint(tiny_edit["qwen-edit"], "a ring", picture, mask, seed=3, steps=4, strength=0.6)
    for backend in BACKENDS:
        ours = opened("qwen-edit", backend)("a ring", image=picture, mask=mask, seed=3, steps=4, guidance=4.0)
        error = relative(ours.latents, latents)
        print(f"{backend} {width}x{height}: {error:.1e} (limit {LATENTS})")
        assert error <= LATENTS and ours.recipe["strength"] == 0.6
