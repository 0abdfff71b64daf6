"""diffusers' Krea 2 pipeline as the reference for the whole way, one prompt and one image at a time.

- The sinusoid of a time is in float32 there, whose angles of up to 1000 radians are worth more than all else: it is
  made in float64 here.
- RoPE's frequencies of the text encoder, as in `oracle`.
- Every prompt is filled up to 512 tokens there, with pads in front of the template's end that nothing attends to.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm, Krea2TimestepEmbedding

from qwenimg.common.numbers.timesteps import timestep_features
from support import oracle, peer


class ExactTime(Krea2TimestepEmbedding):
    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.from_numpy(timestep_features(1000 * float(time), self.embed_dim)) for time in timestep]
        row = torch.stack(rows)[:, None].to(dtype)
        return self.linear_2(torch.nn.functional.gelu(self.linear_1(row), approximate="tanh"))


class ExactNorm(Krea2RMSNorm):
    """In the dtype of its input: a model in float64 stays there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (self.dim,), weight=self.weight + 1.0, eps=self.eps)


def exact(transformer: Any) -> Any:
    """With sinusoids from float64, and norms that are in float64 if the model is."""
    transformer.time_embed.__class__ = ExactTime
    for module in transformer.modules():
        if isinstance(module, Krea2RMSNorm):
            module.__class__ = ExactNorm
    return transformer


@cache
def pipeline(folder: Path) -> Any:
    pipe = peer.opened("Krea2Pipeline", folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    oracle.compute_frequencies(pipe.text_encoder)
    return pipe


def generate(
    folder: Path,
    prompt: str,
    latents: np.ndarray,
    *,
    steps: int,
    guidance: float,
    negative_prompt: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """diffusers' final latents [1, C, h, w] and pixels [H, W, 3] as uint8 values in float64, for noise [1, C, h, w]."""
    pipe, (height, width) = pipeline(folder), latents.shape[2:]
    asked: dict[str, Any] = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "width": width * 8,
        "height": height * 8,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "latents": pipe._pack_latents(torch.from_numpy(latents), 1, latents.shape[1], height, width),
    }
    packed = pipe(**asked, output_type="latent").images
    final = pipe._unpack_latents(packed, height * 8, width * 8)[:, :, 0]
    pixels = pipe(**asked, output_type="np").images[0]
    return final.numpy(), (pixels * 255).round().astype(np.float64)
