"""`only_masked` through whole pipelines against diffusers' `padding_mask_crop`: crop, drawing and overlay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support import oracle, oracle_sd

import qwenimg

BACKENDS = ("cpu", "mlx")
PIXELS = 2  # of 255
PROMPT, NEGATIVE = "a red circle", "a blue square"
PICTURE = np.random.default_rng(3).integers(0, 256, (111, 150, 3), np.uint8)
PICTURE[30:80, 40:120] = (200, 40, 90)


def hole(top: int, bottom: int, left: int, right: int) -> np.ndarray:
    mask = np.zeros((111, 150), np.uint8)
    mask[top:bottom, left:right] = 255
    return mask


# In the middle; at a corner; as wide as the picture, so that bands above and below are made up.
AREAS = [(hole(50, 71, 60, 90), 8), (hole(0, 30, 120, 150), 32), (hole(40, 60, 0, 150), 5)]


def compare(name: str, folder: Path, expected: np.ndarray, **asked: Any) -> None:
    for backend in BACKENDS:
        pipe = qwenimg.load(folder, backend=backend, precision="fp32")
        made = pipe(PROMPT, negative_prompt=NEGATIVE, image=PICTURE, strength=0.7, **asked)
        outside = asked["mask"] == 0
        worst = np.abs(made.pixels.astype(int) - expected).max()
        changed = np.abs(made.pixels.astype(int) - PICTURE)[~outside].mean()
        print(f"{name} {backend}: pixels {worst} of 255, changed inside by {changed:.0f}")
        assert np.array_equal(made.pixels[outside], PICTURE[outside])
        assert worst <= PIXELS and changed > 10


@pytest.mark.parametrize("name", ["sd21", "inpaint"])
@pytest.mark.parametrize("area", AREAS)
@pytest.mark.sample(1)
def test_stable_diffusion(folders: dict[str, Path], name: str, area: tuple[np.ndarray, int]) -> None:
    mask, padding = area
    pipe = oracle_sd.pipeline(folders[name], "StableDiffusionInpaintPipeline")
    [theirs] = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE, image=Image.fromarray(PICTURE), mask_image=Image.fromarray(mask),
        padding_mask_crop=padding, width=88, height=72, strength=0.7, guidance_scale=4.0, num_inference_steps=5,
        generator=torch.Generator().manual_seed(9),
    ).images  # fmt: skip
    asked = {"width": 88, "height": 72, "steps": 5, "guidance": 4.0, "seed": 9}
    compare(name, folders[name], np.asarray(theirs), mask=mask, only_masked=padding, **asked)


@pytest.mark.sample(0)
def test_qwen_image(tiny_folder: Path) -> None:
    mask, padding = AREAS[0]
    pipe = diffusers.QwenImageInpaintPipeline(**oracle.pipeline(tiny_folder).components)
    pipe.set_progress_bar_config(disable=True)
    [theirs] = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE, image=Image.fromarray(PICTURE), mask_image=Image.fromarray(mask),
        padding_mask_crop=padding, width=80, height=48, strength=0.7, true_cfg_scale=4.0, num_inference_steps=6,
        generator=torch.Generator().manual_seed(5),
    ).images  # fmt: skip
    asked = {"width": 80, "height": 48, "steps": 6, "guidance": 4.0, "seed": 5}
    compare("qwen", tiny_folder, np.asarray(theirs), mask=mask, only_masked=padding, **asked)
