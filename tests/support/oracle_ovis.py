"""diffusers' Ovis-Image pipeline as the reference for the whole way: exact sinusoids of times, as in `oracle_flux`.

Defects worked around: the pipeline makes positions in the dtype of the text encoder, so that they are rounded from 257
on in bfloat16; here it is float32.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support import peer
from support.oracle_flux import exact_sinusoids


@cache
def pipeline(folder: Path) -> Any:
    pipe = peer.opened("OvisImagePipeline", folder, torch_dtype=torch.float32)
    rotary = pipe.text_encoder.rotary_emb  # as in `oracle`
    rotary.inv_freq.copy_(rotary.compute_default_rope_parameters(rotary.config)[0])
    pipe.transformer.time_proj.forward = exact_sinusoids
    return pipe


def generate(
    folder: Path,
    prompt: str,
    seed: int,
    *,
    width: int,
    height: int,
    negative_prompt: str = "",
    steps: int,
    guidance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    pipe = pipeline(folder)
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        num_inference_steps=steps,
        guidance_scale=guidance,
        width=width,
        height=height,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
    ).images
    latents = pipe._unpack_latents(final, height, width, pipe.vae_scale_factor)
    return latents.numpy(), peer.decoded(pipe, latents)
