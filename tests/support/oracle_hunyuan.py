"""diffusers' Hunyuan-DiT pipeline as the reference for the whole way, one prompt and one image at a time.

- Sizes are drawn as they are asked for, not mapped to those of the training.
- Sinusoids of times and sizes are in float32: times up to 1000 differ by 6e-5 radians from those of here, so exact ones
  are given.
- Its rotations are wrong where the picture is no square: its end of a side that does not begin at 0 is not the one of
  the model's authors, whose places are here, `start + (stop - start) i / n`, in float64.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer


@cache
def pipeline(folder: Path) -> Any:
    from diffusers.pipelines.hunyuandit import pipeline_hunyuandit

    pipeline_hunyuandit.get_2d_rotary_pos_embed = rotations
    pipe = peer.opened("HunyuanDiTPipeline", folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    return pipe


def exact(transformer: Any) -> None:
    """Give a transformer exact sinusoids."""
    embed = transformer.time_extra_emb
    embed.time_proj.forward = embed.size_proj.forward = _rows


def _rows(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.stack([sinusoids(float(value), 256) for value in values])).float()


def rotations(dim: int, crops: Any, grid: Any, **_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [L D] of the authors' places."""
    sides = [np.linspace(crops[0][i], crops[1][i], grid[i], endpoint=False, dtype=np.float64) for i in (0, 1)]
    rows, columns = np.meshgrid(*sides, indexing="ij")
    frequencies = 10000.0 ** -(np.arange(0, dim // 2, 2) / (dim // 2))
    angles = np.concatenate([np.outer(one.ravel(), frequencies) for one in (columns, rows)], axis=1).repeat(2, axis=1)
    return torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()


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
        output_type="latent",
        **more,
    ).images
    return final.numpy(), peer.decoded(pipe, final)


def from_picture(
    folder: Path, prompt: str, picture: np.ndarray, *, steps: int, strength: float, seed: int, **asked: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The same for a `picture` [H, W, 3] to start from: its pipeline has no class for that, so the scheduler is given
    the rest of the times."""
    pipe, generator = pipeline(folder), torch.Generator().manual_seed(seed)
    latents = pipe.vae.encode(pipe.image_processor.preprocess(Image.fromarray(picture))).latent_dist.sample(generator)
    noise = torch.randn(latents.shape, generator=generator)
    own = pipe.scheduler
    own.set_timesteps(steps)
    times = own.timesteps[steps - int(steps * strength) :]
    start = own.add_noise(latents * pipe.vae.config.scaling_factor, noise, times[:1])
    height, width = picture.shape[:2]

    def set_timesteps(count: int, **_: object) -> None:
        own.timesteps = times

    own.set_timesteps = set_timesteps
    try:
        given = {"latents": start.detach(), "generator": generator}
        return generate(folder, prompt, width=width, height=height, steps=len(times), **given, **asked)
    finally:
        del own.set_timesteps
