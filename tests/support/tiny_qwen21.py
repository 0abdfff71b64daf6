"""Tiny Qwen-Image-2.1 folders, written by diffusers itself, with nothing in them that is all ones or zeros.

Odd widths, three layers, three heads, fewer key than query heads, heads wider than the stream in the text encoder,
every norm and bias non-trivial, several shards. Weights are louder than those of `tiny_model`, so that a prompt, a
picture, its positions and its timestep all move the result.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_model import randomise

DIT: dict[str, Any] = {
    "in_channels": 12,
    "out_channels": 12,
    "num_layers": 3,
    "attention_head_dim": 22,
    "num_attention_heads": 3,
    "context_in_dim": 60,
    "mlp_ratio": 3,
    "axes_dims_rope": (6, 8, 8),
}
TEXT: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_interleaved": True,
        "mrope_section": [3, 2, 2],
    },
}
VAE: dict[str, Any] = {
    "base_dim": 6,
    "decoder_base_dim": 9,
    "z_dim": 12,
    "dim_mult": [1, 2, 4, 8, 8],
    "num_res_blocks": 1,
    "latents_mean": [0.1 * i - 0.5 for i in range(12)],
    "latents_std": [1.0 + 0.1 * i for i in range(12)],
}
GAIN = 1.5


def tiny_dit(seed: int = 1, **changes: object) -> torch.nn.Module:
    """diffusers' transformer with the tiny configuration, float32, randomised."""
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(**(DIT | changes))
    randomise(model, seed)
    model.txt_in.text_norm.weight.data -= 1  # it is stored minus one
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(GAIN)
    return model.eval()


def tiny_vae(seed: int = 2, **changes: object) -> torch.nn.Module:
    from diffusers import AutoencoderKLQwenImage21

    model = AutoencoderKLQwenImage21(**(VAE | changes))
    randomise(model, seed)
    return model.eval()
