"""Image-to-image and inpainting with Qwen-Image, against diffusers, and other samplers than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import oracle

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers import packing
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.sampling.table import SAMPLERS

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 after all steps, float32; measured at most 3e-6
PROMPT, NEGATIVE = "a red circle", "blurry, an ugly green square on the right"
PICTURE = np.random.default_rng(3).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[16:32, 24:60] = 255


def expected(folder: Path, class_name: str, **asked: Any) -> np.ndarray:
    """diffusers' final latents [1, C, h, w]."""
    import diffusers

    pipe = getattr(diffusers, class_name)(**oracle.pipeline(folder).components)
    pipe.set_progress_bar_config(disable=True)
    final = pipe(
        prompt=PROMPT, negative_prompt=NEGATIVE, true_cfg_scale=4.0, width=80, height=48, num_inference_steps=6,
        image=Image.fromarray(PICTURE), generator=torch.Generator().manual_seed(5), output_type="latent", **asked,
    ).images  # fmt: skip
    return packing.unpack(final.float().numpy(), 6, 10)


@pytest.fixture(scope="module")
def pipes(tiny_folder: Path) -> dict[str, Pipeline]:
    return {backend: qwenimg.load(tiny_folder, backend=backend, precision="fp32") for backend in BACKENDS}


@pytest.mark.parametrize("strength", [0.4, 1.0])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_folder: Path, pipes: dict[str, Pipeline], strength: float, mask: bool) -> None:
    name = "QwenImageInpaintPipeline" if mask else "QwenImageImg2ImgPipeline"
    holes = {"mask_image": Image.fromarray(HOLE)} if mask else {}
    theirs = expected(tiny_folder, name, strength=strength, **holes)
    for backend, pipe in pipes.items():
        made = pipe(
            PROMPT, negative_prompt=NEGATIVE, image=PICTURE, mask=HOLE if mask else None, strength=strength, steps=6,
            guidance=4.0, seed=5,
        )  # fmt: skip
        error = np.linalg.norm(made.latents - theirs) / np.linalg.norm(theirs)
        print(f"{backend} strength {strength} mask {mask}: {error:.2e}")
        assert error <= LATENTS and made.pixels.shape == PICTURE.shape


@pytest.mark.parametrize("sampler", [name for name, s in SAMPLERS.items() if s.flow])
@pytest.mark.sample(1)
def test_every_sampler_with_a_form_for_flow(pipes: dict[str, Pipeline], sampler: str) -> None:
    """Both backends alike, all finite, and near the picture of many Euler steps where nothing is drawn."""
    asked = {"width": 48, "height": 32, "steps": 5, "guidance": 2.0, "seed": 5, "sampler": sampler}
    made = [pipes[backend](PROMPT, **asked) for backend in BACKENDS]
    error = np.linalg.norm(made[0].latents - made[1].latents) / np.linalg.norm(made[0].latents)
    print(f"{sampler}: {error:.2e}")
    assert error <= LATENTS
    assert made[0].recipe["sampler"] == sampler


@pytest.mark.parametrize("sampler", [name for name, s in SAMPLERS.items() if not s.flow])
def test_samplers_without_one_are_refused(pipes: dict[str, Pipeline], sampler: str) -> None:
    with pytest.raises(UsageError, match="flow models"):
        pipes["cpu"].check(PROMPT, sampler=sampler)
