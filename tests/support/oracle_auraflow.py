"""diffusers' AuraFlow pipeline as the reference for the whole way, one prompt and one image at a time.

- Exact sinusoids of times: those of its class are float32, of angles of up to 1000.
- Norms in the dtype of the model: those of its class are float32 in a model of float64 too.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.normalization import FP32LayerNorm
from PIL import Image

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer


@cache
def pipeline(folder: Path) -> Any:
    pipe = peer.opened("AuraFlowPipeline", folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    return pipe


def exact(transformer: Any) -> None:
    """Give a transformer exact sinusoids of times, which are noise levels, and norms in its dtype."""
    transformer.time_step_embed.forward = lambda times: torch.from_numpy(
        np.stack([sinusoids(1000 * float(time), 256) for time in times])
    )
    for norm in transformer.modules():
        if isinstance(norm, FP32LayerNorm):
            norm.__class__ = torch.nn.LayerNorm


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


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, steps: int, strength: float, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from: its pipeline has no class for that. Noise, latents and levels
    are those of Stable Diffusion 3's class, whose scheduler is the same; its steps go on from here by hand."""
    pipe, generator = pipeline(folder), torch.Generator().manual_seed(seed)
    pipe.scheduler.set_timesteps(steps)
    first = steps - min(int(steps * strength), steps)
    with torch.no_grad():
        pixels = pipe.image_processor.preprocess(Image.fromarray(picture))
        latents = pipe.vae.encode(pixels).latent_dist.sample(generator) * pipe.vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=generator)
        levels = pipe.scheduler.sigmas[first:]
        x = levels[0] * noise + (1 - levels[0]) * latents
        texts = pipe.encode_prompt(prompt, asked["negative_prompt"], True)
        for level, following in pairwise(levels):
            time = level[None]
            one, other = (
                pipe.transformer(x, encoder_hidden_states=text, timestep=time, return_dict=False)[0]
                for text in (texts[0], texts[2])
            )
            x = x + (following - level) * (other + asked["guidance"] * (one - other))
    return x.numpy(), peer.decoded(pipe, x)
