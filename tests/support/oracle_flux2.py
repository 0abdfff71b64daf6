"""diffusers' pipelines of FLUX.2 klein and dev as the reference, one prompt and one image at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import peer


@cache
def pipeline(folder: Path, task: str = "") -> Any:
    """diffusers' pipeline of klein for text and references, for the `task` Inpaint, or of klein KV."""
    return peer.opened(f"Flux2Klein{task}Pipeline", folder, torch_dtype=torch.float32)


@cache
def dev_pipeline(folder: Path) -> Any:
    """diffusers' pipeline of dev."""
    return peer.opened("Flux2Pipeline", folder, torch_dtype=torch.float32)


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    steps: int,
    guidance: float,
    images: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w], in patches and standardized, and pixels [H, W, 3] as uint8 values in
    float64, for noise [1, C, h, w] and reference `images` [H, W, 3]."""
    return _finished(
        pipeline(folder), _final(pipeline(folder), prompt, latents, steps, images, guidance_scale=guidance)
    )


def generate_kv(
    folder: Path, prompt: str, latents: np.ndarray, *, steps: int, images: list[np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same of klein KV, which has no guidance."""
    pipe = pipeline(folder, "KV")
    return _finished(pipe, _final(pipe, prompt, latents, steps, images))


def generate_dev(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    steps: int,
    guidance: float,
    images: list[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The same of dev, whose pipeline returns latents as tokens and standardized."""
    pipe, (height, width) = dev_pipeline(folder), latents.shape[2:]
    tokens = _final(pipe, prompt, latents, steps, images, guidance_scale=guidance)
    last = tokens.transpose(1, 2).reshape(1, -1, height, width)
    mean, std = _statistics(pipe)
    with torch.no_grad():
        pixels = pipe.vae.decode(pipe._unpatchify_latents(last * std + mean), return_dict=False)[0]
    return last.numpy(), peer.pixels(pipe, pixels)


def _final(
    pipe: Any,
    prompt: str,
    latents: np.ndarray,
    steps: int,
    images: list[np.ndarray] | None,
    **asked: float,
) -> torch.Tensor:
    """The latents of a pipeline."""
    final: torch.Tensor = pipe(
        image=[Image.fromarray(image) for image in images] if images else None,
        prompt=prompt,
        width=latents.shape[3] * 16,
        height=latents.shape[2] * 16,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents),
        output_type="latent",
        **asked,
    ).images
    return final


def inpainted(
    folder: Path, prompt: str, picture: np.ndarray, mask: np.ndarray, *, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] of which a `mask` [H, W] is drawn anew; the whole is a reference too."""
    pipe = pipeline(folder, "Inpaint")
    final = pipe(
        image=Image.fromarray(picture),
        mask_image=Image.fromarray(mask),
        prompt=prompt,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **asked,
    ).images
    return _finished(pipe, final)


def _finished(pipe: Any, final: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Latents and pixels of what a pipeline returns."""
    mean, std = _statistics(pipe)
    with torch.no_grad():
        pixels = pipe.vae.decode(final, return_dict=False)[0]
        last = (pipe._patchify_latents(final) - mean) / std
    return last.numpy(), peer.pixels(pipe, pixels)


def _statistics(pipe: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and deviation of each channel of latents in patches."""
    bn = pipe.vae.bn
    return bn.running_mean[:, None, None], torch.sqrt(bn.running_var[:, None, None] + bn.eps)
