"""FLUX.1 Kontext and Fill from a picture to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from support import oracle_flux, peer

import qwenimg
from qwenimg.common.families.flux import references
from qwenimg.common.pipeline.result import Result

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents; measured at most 2e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
SIZES = ((48, 96), (64, 80), (64, 64), (80, 64), (96, 48))  # small ones, in place of a megapixel

RNG = np.random.default_rng(5)
PICTURE = RNG.integers(0, 256, (61, 90, 3), np.uint8)  # seen at 80x64
FITTING = RNG.integers(0, 256, (64, 80, 3), np.uint8)
HOLE = np.zeros((64, 80), np.uint8)
HOLE[9:43, 21:] = 255  # edges inside of latents


def ours(folder: Path, backend: str, **asked: Any) -> Result:
    with qwenimg.load(folder, backend=backend, precision="fp32") as pipe:
        return pipe(**asked, seed=7)


def compare(folder: Path, latents: Any, pixels: Any, asked: dict[str, Any]) -> None:
    """Both backends' picture with `asked` and diffusers'."""
    assert pixels.std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = ours(folder, backend, **asked)
        peer.check_picture(f"{backend}", made, (latents, pixels), LATENTS, PIXELS)


def theirs(folder: Path, task: str, asked: dict[str, Any], **more: Any) -> Any:
    renamed = {"steps": "num_inference_steps", "guidance": "guidance_scale", "true_cfg": "true_cfg_scale"}
    options = {renamed.get(name, name): value for name, value in asked.items() if name not in ("image", "mask")}
    if "image" in asked:
        options["image"] = Image.fromarray(asked["image"])
    if "mask" in asked:
        options["mask_image"] = Image.fromarray(asked["mask"])
    return oracle_flux.generate(folder, task, seed=7, length=512, **options, **more)


# Kontext

EDITS: list[dict[str, Any]] = [
    {"prompt": "make it red", "image": PICTURE, "width": 48, "height": 112, "steps": 3, "guidance": 2.5},
    {"prompt": "a star", "image": FITTING, "width": 80, "height": 48, "steps": 2, "guidance": 6.0,
     "negative_prompt": "blurry, low", "true_cfg": 2.5},
    {"prompt": "no picture", "width": 64, "height": 48, "steps": 2, "guidance": 3.5},
]  # fmt: skip


@pytest.mark.parametrize("asked", EDITS, ids=lambda asked: asked["prompt"])
@pytest.mark.sample(1)
def test_kontext_equals_diffusers(
    tiny_flux: dict[str, Path], monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(references, "SIZES", SIZES)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", SIZES)
    area = asked["width"] * asked["height"]
    latents, pixels = theirs(tiny_flux["kontext"], "kontext", asked, max_area=area)
    compare(tiny_flux["kontext"], latents, pixels, asked)


@pytest.mark.sample(0)
def test_kontext_with_a_mask_equals_diffusers(tiny_flux: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "SIZES", SIZES)
    asked = {"prompt": "a red hat", "image": FITTING, "mask": HOLE, "strength": 0.7, "steps": 4, "guidance": 2.5}
    size = {"width": 80, "height": 64}
    more = {"max_area": 80 * 64, "_auto_resize": False}
    latents, pixels = theirs(tiny_flux["kontext"], "kontext-mask", asked | size, **more)
    compare(tiny_flux["kontext"], latents, pixels, asked | size)


def test_the_size_of_a_reference_is_that_of_diffusers() -> None:
    """For pictures of every proportion, and of sizes that are no multiples of 16."""
    table = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    assert tuple(table) == references.SIZES
    rng = np.random.default_rng(0)
    for width, height in rng.integers(16, 3000, (300, 2)).tolist():
        inside = (width - width % 16) / (height - height % 16)
        expected = min((abs(inside - w / h), w, h) for w, h in table)[1:]
        assert references.size(np.zeros((height, width, 3), np.uint8)) == expected
    with pytest.raises(qwenimg.UsageError, match="a picture of 900x15 is too narrow: give 16 pixels or more a side"):
        references.size(np.zeros((15, 900, 3), np.uint8))


# Fill

FILLS: list[dict[str, Any]] = [
    {"prompt": "a red circle", "width": 80, "height": 64, "steps": 3, "guidance": 30.0},
    {"prompt": "a dog", "width": 48, "height": 112, "steps": 2, "guidance": 4.0},
    {"prompt": "a ring", "width": 80, "height": 64, "steps": 4, "guidance": 30.0, "strength": 0.6},
]


@pytest.mark.parametrize("asked", FILLS, ids=lambda asked: asked["prompt"])
@pytest.mark.sample(0)
def test_fill_equals_diffusers(tiny_flux: dict[str, Path], asked: dict[str, Any]) -> None:
    asked = asked | {"image": FITTING, "mask": HOLE}
    latents, pixels = theirs(tiny_flux["fill"], "fill", asked)
    compare(tiny_flux["fill"], latents, pixels, asked)


@pytest.mark.sample(0)
def test_fill_without_a_mask_draws_all(tiny_flux: dict[str, Path]) -> None:
    """As with a mask of ones: an empty picture, of which the model is told that nothing of it is kept."""
    asked: dict[str, Any] = {"prompt": "a cup", "width": 64, "height": 48, "steps": 2}
    grey = np.full((48, 64, 3), 128, np.uint8)
    for backend in BACKENDS:
        free = ours(tiny_flux["fill"], backend, **asked)
        masked = ours(tiny_flux["fill"], backend, **asked, image=grey, mask=np.full((48, 64), 255, np.uint8))
        assert free.latents.shape == masked.latents.shape == (1, 16, 6, 8)
        assert free.pixels.std() > 10
