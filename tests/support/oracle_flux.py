"""diffusers' Flux.1 pipelines as the reference for the whole way, one prompt and one image at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer

CLASSES = {
    "text": "FluxPipeline",
    "image": "FluxImg2ImgPipeline",
    "mask": "FluxInpaintPipeline",
    "kontext": "FluxKontextPipeline",
    "kontext-mask": "FluxKontextInpaintPipeline",
    "fill": "FluxFillPipeline",
    "control": "FluxControlPipeline",
    "control-image": "FluxControlImg2ImgPipeline",
    "control-mask": "FluxControlInpaintPipeline",
}


def exact_sinusoids(values: torch.Tensor) -> torch.Tensor:
    """The reference's own are in float32, whose angles of up to 3500 radians are worth 1e-5 of this model's result."""
    return torch.from_numpy(np.stack([sinusoids(float(value), 256) for value in values])).float()


@cache
def pipeline(folder: Path, task: str) -> Any:
    return made(folder, task)


def made(folder: Path, task: str) -> Any:
    pipe = peer.opened(CLASSES[task], folder, torch_dtype=torch.float32)
    pipe.transformer.time_text_embed.time_proj.forward = exact_sinusoids
    return pipe


def generate(folder: Path, task: str, *, width: int, height: int, seed: int, length: int, **options: Any) -> Any:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    return generated(pipeline(folder, task), width=width, height=height, seed=seed, length=length, **options)


def generated(pipe: Any, *, width: int, height: int, seed: int, length: int, **options: Any) -> Any:
    """The same by a pipeline."""
    final = pipe(
        width=width,
        height=height,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=length,
        output_type="latent",
        **options,
    ).images
    latents = pipe._unpack_latents(final, height, width, pipe.vae_scale_factor)
    return latents.numpy(), peer.decoded(pipe, latents)
