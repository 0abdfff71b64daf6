"""diffusers' Lumina-Image 2.0 pipeline as the reference for the whole way, one prompt and one image at a time.

- Its text encoder attends by a kernel that leaves out the soft caps of Gemma 2's configuration, unless it is asked for
  the eager one, which transformers took by default when the model was trained.
- Its sinusoids of times are float32: within 1e-7 of those of here.
- The bound of noise levels that it computes counts channels as tokens; its published levels do not use it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import peer


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, steps: int, strength: float, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from: its pipeline has no class for that, but takes latents and
    noise levels, which are those of Z-Image's class here."""
    pipe, generator = pipeline(folder), torch.Generator().manual_seed(seed)
    config, count = pipe.vae.config, int(steps * strength)
    pixels = pipe.image_processor.preprocess(Image.fromarray(picture))
    latents = pipe.vae.encode(pixels).latent_dist.sample(generator)
    latents = (latents - config.shift_factor) * config.scaling_factor
    levels = np.linspace(1.0, 1 / steps, steps)[steps - count :]
    first = 6.0 * levels[0] / (1 + 5.0 * levels[0])
    start = first * torch.randn(latents.shape, generator=generator) + (1 - first) * latents
    return generate(folder, prompt, start.detach().numpy(), steps=count, sigmas=[*levels], **asked)


@cache
def pipeline(folder: Path) -> Any:
    from transformers import Gemma2Model

    text = Gemma2Model.from_pretrained(folder / "text_encoder", attn_implementation="eager").eval()
    return peer.opened("Lumina2Pipeline", folder, torch_dtype=torch.float32, text_encoder=text)


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    negative_prompt: str = "",
    steps: int,
    guidance: float,
    **more: Any,
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
    return final.numpy(), peer.decoded(pipe, final)
