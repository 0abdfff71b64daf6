"""diffusers' Chroma pipelines as the reference for the whole way, with their defects worked around.

- The mask of the padding is a number, which attention adds to its scores: made a truth, which keeps tokens out.
- Inpainting reads `guidance_embeds`, which the transformer's configuration has not.
- Exact sinusoids of times, as in `oracle_flux`. Those of the vectors' numbers stay in float32: so the model saw them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer

CLASSES = {"text": "ChromaPipeline", "image": "ChromaImg2ImgPipeline", "mask": "ChromaInpaintPipeline"}


@cache
def pipeline(folder: Path, task: str) -> Any:
    pipe = peer.opened(CLASSES[task], folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    pipe.transformer.register_to_config(guidance_embeds=False)
    pipe.transformer.register_forward_pre_hook(_masked, with_kwargs=True)
    return pipe


def _masked(transformer: Any, args: Any, given: dict[str, Any]) -> Any:
    return args, given | {"attention_mask": given["attention_mask"].bool()}


def exact(transformer: Any) -> None:
    """Give a transformer exact sinusoids of times."""
    projection = transformer.time_text_embed.time_proj
    channels = projection.num_channels
    projection.forward = lambda values: torch.from_numpy(
        np.stack([sinusoids(float(value), channels) for value in values])
    ).float()


def generate(folder: Path, task: str, *, width: int, height: int, seed: int, **options: Any) -> Any:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder, task)
    generator = torch.Generator().manual_seed(seed)
    final = pipe(width=width, height=height, generator=generator, output_type="latent", **options).images
    latents = pipe._unpack_latents(final, height, width, pipe.vae_scale_factor)
    return latents.numpy(), peer.decoded(pipe, latents)
