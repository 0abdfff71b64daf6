"""A tiny Flux.1, made by diffusers itself, with nothing in it that is all ones or zeros.

Odd widths, more layers than one of each kind, every norm and bias non-trivial.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_model import randomise

DIT: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "joint_attention_dim": 60,
    "pooled_projection_dim": 26,
    "guidance_embeds": True,
    "axes_dims_rope": [6, 8, 8],
}


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration of dev, float32, randomised."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**(DIT | changes))
    randomise(model, seed)
    return model.eval()
