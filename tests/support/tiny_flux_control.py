"""Tiny ControlNets for Flux.1, made by diffusers, with nothing in them that is all ones or zeros; loud, so that a
picture moves the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.tiny_flux import DIT
from support.tiny_model import randomise

LAYERS: dict[str, dict[str, Any]] = {
    "pro-2": {"num_layers": 1, "num_single_layers": 0},  # a residual for several blocks, and none of one stream
    "union": {"num_layers": 2, "num_single_layers": 2, "num_mode": 7},
    "canny": {"num_layers": 2, "num_single_layers": 1},
    "schnell": {"num_layers": 1, "num_single_layers": 3, "guidance_embeds": False},
}
GAIN, PICTURE_GAIN, KIND_GAIN = 2.0, 4.0, 16.0


def tiny_controlnet(kind: str = "pro-2", seed: int = 11, **changes: Any) -> torch.nn.Module:
    """diffusers' ControlNet of this kind for the tiny transformer, float32, randomised."""
    from diffusers import FluxControlNetModel

    fields = DIT | {"pooled_projection_dim": 60} | LAYERS[kind] | changes
    model = FluxControlNetModel(**fields)
    randomise(model, seed)
    model.controlnet_x_embedder.weight.data.mul_(PICTURE_GAIN)
    for name, value in model.named_parameters():
        if name.startswith(("controlnet_blocks", "controlnet_single_blocks")):
            value.data.mul_(GAIN)
        if name.startswith("controlnet_mode_embedder"):
            value.data.mul_(KIND_GAIN)
    return model.eval()


def write_controlnet(folder: Path, kind: str = "pro-2", seed: int = 11, **changes: Any) -> Path:
    """Write a folder in diffusers layout, and return it."""
    tiny_controlnet(kind, seed, **changes).save_pretrained(folder)
    return folder
