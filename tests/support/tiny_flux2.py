"""Tiny Flux.2 networks of diffusers and transformers, with nothing in them that is all ones or zeros."""

from __future__ import annotations

from typing import Any

import torch
from tiny_model import randomise

DIT: dict[str, Any] = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 180,
    "timestep_guidance_channels": 64,
    "axes_dims_rope": (4, 6, 4, 8),
    "guidance_embeds": False,
}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()
