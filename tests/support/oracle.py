"""diffusers as the reference for the whole pipeline, with its known defects worked around in this one place.

- One prompt and one image at a time: with several it orders masks and embeddings differently.
- It runs in the dtype that it is loaded in and rounds the timestep to it; `dtype` chooses.
- transformers leaves RoPE's frequencies, which no file has, as they come from memory where models were drawn on the
  pretend accelerator before, in the same process (why is not known): they are computed again.
- One torch thread (conftest): tiny models stall on several, and results differ between thread counts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.numbers.packing import pack, unpack
from support import peer


@cache
def pipeline(folder: Path, dtype: torch.dtype = torch.float32):
    pipe = peer.opened("QwenImagePipeline", folder, torch_dtype=dtype)
    compute_frequencies(pipe.text_encoder)
    pipe.vae.to(torch.float32)  # our policy keeps the VAE in float32; the reference decodes in its dtype
    return pipe


def compute_frequencies(text_encoder: Any) -> None:
    """Compute RoPE's frequencies of a language model and of its vision tower again."""
    model = getattr(text_encoder, "model", text_encoder)  # Krea 2's has no head
    language, vision = model.language_model.rotary_emb, model.visual.rotary_pos_emb
    language.inv_freq.copy_(language.compute_default_rope_parameters(language.config)[0])
    vision.inv_freq.copy_(vision.compute_axial_rope_parameters(vision.config)[0])


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    negative_prompt: str | None = " ",
    steps: int = 5,
    guidance: float = 4.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64."""
    size, packed = (latents.shape[3] * 8, latents.shape[2] * 8), torch.from_numpy(pack(latents)).to(dtype)
    asked: dict[str, Any] = {"negative_prompt": negative_prompt, "steps": steps, "guidance": guidance}
    return drawn(pipeline(folder, dtype), prompt, size, **asked, latents=packed)


def drawn(
    pipe: Any,
    prompt: str,
    size: tuple[int, int],
    *,
    negative_prompt: str | None,
    steps: int,
    guidance: float,
    **given: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the final latents [1, C, h, w] of one of diffusers' pipelines, and their pixels. given: its own inputs."""
    width, height = size
    final = pipe(
        prompt=prompt,
        negative_prompt=negative_prompt,
        true_cfg_scale=guidance,
        width=width,
        height=height,
        num_inference_steps=steps,
        output_type="latent",
        **given,
    ).images
    latents = unpack(final.float().numpy(), height // 8, width // 8)
    return latents, decoded(pipe, latents)


def decoded(pipe: Any, final: np.ndarray) -> np.ndarray:
    """The pixels [H, W, 3] of final latents, as uint8 values in float64."""
    config = pipe.vae.config
    mean, std = (torch.tensor(v)[None, :, None, None] for v in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        z = torch.from_numpy(final) / (1.0 / std) + mean
        return peer.pixels(pipe, pipe.vae.decode(z[:, :, None], return_dict=False)[0][:, :, 0])
