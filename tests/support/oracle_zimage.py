"""diffusers' Z-Image pipeline as the reference for the whole way, one prompt and one image at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


@cache
def pipeline(folder: Path, task: str = "") -> Any:
    """diffusers' pipeline for text, or for the `task` Img2Img or Inpaint."""
    import diffusers
    import transformers

    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()
    pipe = getattr(diffusers, f"ZImage{task}Pipeline").from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    negative_prompt: str = "",
    steps: int = 8,
    guidance: float = 0.0,
    **more: float,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        guidance_scale=guidance,
        width=latents.shape[3] * 8,
        height=latents.shape[2] * 8,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents),
        output_type="latent",
        **more,
    ).images
    return final.numpy(), _decoded(pipe, final)


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, mask: np.ndarray | None, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from, and where there is a `mask` [H, W], of what is drawn anew."""
    pipe = pipeline(folder, "Img2Img" if mask is None else "Inpaint")
    final = pipe(
        prompt,
        image=Image.fromarray(picture),
        **({} if mask is None else {"mask_image": Image.fromarray(mask)}),
        height=picture.shape[0],
        width=picture.shape[1],
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **asked,
    ).images
    return final.numpy(), _decoded(pipe, final)


def _decoded(pipe: Any, final: torch.Tensor) -> np.ndarray:
    """Pixels [H, W, 3] as uint8 values in float64."""
    config = pipe.vae.config
    with torch.no_grad():
        pixels = pipe.vae.decode(final / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    image = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return (image * 255).round().astype(np.float64)
