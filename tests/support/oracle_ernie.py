"""diffusers' ERNIE-Image pipeline as the reference for the whole way, one prompt and one image at a time.

- The sinusoid of a time is in float32 there, whose angles of up to 1000 radians are worth more than all else, and so
  are the angles of RoPE: both are made in float64 here.
- Levels come from torch.linspace in float32, whose last bit depends on the machine, and a bit is worth 1e-4 of the
  latents: of as many steps they are made by NumPy here.
- The VAE's configuration has 1e-4 where the pipeline adds 1e-5 to the variances of latents; its modular pipeline takes
  the configuration's, and decodes another picture.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwenimg.common.numbers.timesteps import sinusoids
from support import peer


def exact(transformer: Any) -> Any:
    """With sinusoids (sines, then cosines) and angles from float64."""
    width, axes, theta = (getattr(transformer.config, name) for name in ("hidden_size", "rope_axes_dim", "rope_theta"))

    def angles(ids: torch.Tensor) -> torch.Tensor:
        """Of each position [B T 3] as [B T 1 D]."""
        rates = [theta ** -(torch.arange(0, axis, 2).double() / axis) for axis in axes]
        parts = [ids[..., i, None].double() * rate for i, rate in enumerate(rates)]
        return torch.cat(parts, dim=-1).repeat_interleave(2, dim=-1)[:, :, None]

    def rows(times: torch.Tensor) -> torch.Tensor:
        made = [np.roll(sinusoids(float(time), width), width // 2) for time in times]
        return torch.from_numpy(np.stack(made))  # the class casts them

    transformer.time_proj.forward, transformer.pos_embed.forward = rows, angles
    return transformer


@cache
def pipeline(folder: Path) -> Any:
    pipe = peer.opened("ErnieImagePipeline", folder, torch_dtype=torch.float32)
    exact(pipe.transformer)
    set_timesteps = pipe.scheduler.set_timesteps
    pipe.scheduler.set_timesteps = lambda sigmas, device: set_timesteps(
        sigmas=np.linspace(1, 1 / len(sigmas), len(sigmas)), device=device
    )
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
    """diffusers' final latents [1, C, h, w], in patches and standardized, and pixels [H, W, 3] as uint8 values in
    float64, for noise [1, C, h, w]."""
    pipe = pipeline(folder)
    asked: dict[str, Any] = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "width": latents.shape[3] * 16,
        "height": latents.shape[2] * 16,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "latents": torch.from_numpy(latents),
    }
    final = pipe(**asked, output_type="latent").images
    pixels = pipe(**asked, output_type="np").images[0]
    return final.numpy(), (pixels * 255).round().astype(np.float64)
