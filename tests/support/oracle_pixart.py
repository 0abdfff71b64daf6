"""diffusers' PixArt pipelines as the reference for the whole way, one prompt and one image at a time.

- Sizes are drawn as they are asked for, not mapped to those of the training and scaled back.
- Prompts are in lower case; links, tags and signs stay, as without the packages that take them out.
- Sinusoids of times and sizes are in float32: times up to 1000 differ by 6e-5 radians from those of here, so exact ones
  are given.
- alpha's pipeline takes the denoised latents of a single step, which is the last state too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.base.config import read_json
from qwenimg.common.numbers.timesteps import sinusoids
from support import peer


@cache
def pipeline(folder: Path) -> Any:
    name = str(read_json(folder / "model_index.json")["_class_name"])
    pipe = peer.opened(name, folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    return pipe


def exact(transformer: Any) -> None:
    """Give a transformer exact sinusoids."""
    embed = transformer.adaln_single.emb
    embed.time_proj.forward = _rows
    if transformer.use_additional_conditions:
        embed.additional_condition_proj.forward = _rows


def _rows(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.stack([sinusoids(float(value), 256) for value in values])).float()


def generate(
    folder: Path,
    prompt: str,
    *,
    negative_prompt: str = "",
    width: int,
    height: int,
    steps: int,
    guidance: float,
    seed: int = 0,
    generator: torch.Generator | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        guidance_scale=guidance,
        width=width,
        height=height,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed) if generator is None else generator,
        use_resolution_binning=False,
        clean_caption=False,
        output_type="latent",
        **more,
    ).images
    return final.numpy(), peer.decoded(pipe, final)


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, steps: int, strength: float, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from: its pipelines have no class for that, but take latents and
    times."""
    pipe, generator = pipeline(folder), torch.Generator().manual_seed(seed)
    latents = pipe.vae.encode(pipe.image_processor.preprocess(Image.fromarray(picture))).latent_dist.sample(generator)
    noise = torch.randn(latents.shape, generator=generator)
    pipe.scheduler.set_timesteps(steps)
    times = pipe.scheduler.timesteps[steps - int(steps * strength) :]
    start = pipe.scheduler.add_noise(latents * pipe.vae.config.scaling_factor, noise, times[:1])
    height, width = picture.shape[:2]
    given = {"latents": start.detach(), "timesteps": times.tolist(), "generator": generator}
    return generate(folder, prompt, width=width, height=height, steps=len(times), **given, **asked)
