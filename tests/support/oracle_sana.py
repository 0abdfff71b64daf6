"""diffusers' SANA pipelines as the reference for the whole way, one prompt and one image at a time.

- Their text encoder attends by a kernel that leaves out the soft caps of Gemma 2's configuration, unless it is asked
  for the eager one.
- They draw in one of a few published sizes and resize, unless they are asked not to.
- Their sinusoids of times are float32: within 1e-4 of those of here at times up to 1000.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from support import peer


@cache
def pipeline(folder: Path) -> Any:
    from transformers import Gemma2Model

    name = "SanaSprintPipeline" if is_sprint(folder) else "SanaPipeline"
    text = Gemma2Model.from_pretrained(folder / "text_encoder", attn_implementation="eager").eval()
    return peer.opened(name, folder, torch_dtype=torch.float32, text_encoder=text)


def is_sprint(folder: Path) -> bool:
    return "SanaSprintPipeline" in (folder / "model_index.json").read_text()


def generate(folder: Path, prompt: str, latents: np.ndarray, *, steps: int, guidance: float, **more: Any) -> Any:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        guidance_scale=guidance,
        width=latents.shape[3] * 32,
        height=latents.shape[2] * 32,
        num_inference_steps=steps,
        latents=torch.from_numpy(latents),
        output_type="latent",
        use_resolution_binning=False,
        return_dict=False,
        **more,
    )[0]
    return final.numpy(), _decoded(pipe, final)


def sprint(folder: Path, prompt: str, *, width: int, height: int, steps: int, guidance: float, seed: int) -> Any:
    """The same for SANA-Sprint, whose noise is drawn by a generator in each step."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        guidance_scale=guidance,
        width=width,
        height=height,
        num_inference_steps=steps,
        intermediate_timesteps=1.3 if steps == 2 else None,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        use_resolution_binning=False,
        return_dict=False,
    )[0]
    return final.numpy(), _decoded(pipe, final)


@torch.inference_mode()
def from_picture(
    folder: Path,
    prompt: str,
    picture: np.ndarray,
    *,
    steps: int,
    strength: float,
    seed: int,
    guidance: float,
    **more: Any,
) -> Any:
    """The same for a `picture` [H, W, 3] to start from: SANA's pipeline has no class for that; its scheduler is set to
    the levels that are left, as those of other models are."""
    pipe, generator = pipeline(folder), torch.Generator().manual_seed(seed)
    pixels = pipe.image_processor.preprocess(Image.fromarray(picture))
    latents = pipe.vae.encode(pixels, return_dict=False)[0] * pipe.vae.config.scaling_factor
    count, scheduler = int(steps * strength), pipe.scheduler
    own = type(scheduler).set_timesteps

    def fewer(number: int, device: Any = None) -> None:
        own(scheduler, steps, device)
        scheduler.sigmas, scheduler.timesteps = scheduler.sigmas[steps - count :], scheduler.timesteps[steps - count :]

    fewer(steps)
    first = float(scheduler.sigmas[0])
    start = first * torch.randn(latents.shape, generator=generator) + (1 - first) * latents
    scheduler.set_timesteps = fewer
    try:
        return generate(folder, prompt, start.numpy(), steps=count, guidance=guidance, **more)
    finally:
        del scheduler.set_timesteps


def _decoded(pipe: Any, final: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return peer.pixels(pipe, pipe.vae.decode(final / pipe.vae.config.scaling_factor, return_dict=False)[0])
