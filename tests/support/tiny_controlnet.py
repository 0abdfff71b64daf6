"""Tiny ControlNets of Stable Diffusion by diffusers, whose 1x1 convolutions are not zero, in the files of published
ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_model import randomise

EMBEDDING = (4, 6, 8, 12)
GAIN = 3.0  # of the picture's convolutions, so that another picture is another image


def controlnet_config(unet: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration of a ControlNet for a UNet."""
    import diffusers

    known = inspect.signature(diffusers.ControlNetModel.__init__).parameters
    config = {key: value for key, value in unet.items() if key in known}
    return config | {"in_channels": 4, "conditioning_embedding_out_channels": EMBEDDING} | changes


def tiny_controlnet(unet: Mapping[str, Any], seed: int = 11, **changes: Any) -> torch.nn.Module:
    """diffusers' ControlNet for a UNet, in float32, randomised."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    model = diffusers.ControlNetModel(**controlnet_config(unet, **changes))
    randomise(model, seed)
    for layer in model.controlnet_cond_embedding.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.data.mul_(GAIN)
    return model.eval()


def authors_names(model: torch.nn.Module, prefix: str = "control_model.") -> dict[str, torch.Tensor]:
    """The tensors of a ControlNet by the names of its authors, written down without the code under test."""
    tensors, blocks = model.state_dict(), len(model.controlnet_cond_embedding.blocks)
    resnet = {
        "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
        "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
    }  # fmt: skip
    moved = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
        "controlnet_mid_block": "middle_block_out.0",
        "controlnet_cond_embedding.conv_in": "input_hint_block.0",
        "controlnet_cond_embedding.conv_out": f"input_hint_block.{2 * blocks + 2}",
    } | {f"controlnet_cond_embedding.blocks.{i}": f"input_hint_block.{2 * i + 2}" for i in range(blocks)}
    number, zero = 1, len(model.controlnet_down_blocks)
    moved |= {f"controlnet_down_blocks.{i}": f"zero_convs.{i}.0" for i in range(zero)}
    for i, block in enumerate(model.down_blocks):
        for j in range(len(block.resnets)):
            moved[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{number}.0"
            moved[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{number}.1"
            number += 1
        if block.downsamplers:
            moved[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    written = {}
    for name, tensor in tensors.items():
        start = max((key for key in moved if name.startswith(key + ".")), key=len)
        rest = name[len(start) + 1 :]
        if ".resnets." in start:
            part, _, leaf = rest.rpartition(".")
            rest = f"{resnet[part]}.{leaf}"
        written[f"{prefix}{moved[start]}.{rest}"] = tensor.contiguous()
    return written


def write_controlnet(folder: Path, unet: Mapping[str, Any], seed: int = 11, **changes: Any) -> Path:
    """Write a folder in diffusers layout, and return it."""
    tiny_controlnet(unet, seed, **changes).save_pretrained(folder)
    return folder


def write_authors_file(file: Path, unet: Mapping[str, Any], seed: int = 11, prefix: str = "control_model.") -> Path:
    """Write one file with its authors' names, and return it."""
    save_file(authors_names(tiny_controlnet(unet, seed), prefix), file)
    return file


def tiny_union(unet: Mapping[str, Any], seed: int = 11, **changes: Any) -> torch.nn.Module:
    """diffusers' ControlNet Union for a UNet, in float32, randomised."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    known = inspect.signature(diffusers.ControlNetUnionModel.__init__).parameters
    width = unet["block_out_channels"][0]
    config = {key: value for key, value in unet.items() if key in known} | {
        "in_channels": 4, "conditioning_embedding_out_channels": EMBEDDING, "num_control_type": 8,
        "num_trans_channel": width, "num_proj_channel": width, "num_trans_head": 2,
    }  # fmt: skip
    model = diffusers.ControlNetUnionModel(**config | changes)
    randomise(model, seed)
    for layer in model.controlnet_cond_embedding.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight.data.mul_(GAIN)
    return model.eval()


def write_union(folder: Path, unet: Mapping[str, Any], seed: int = 11, **changes: Any) -> Path:
    """Write a folder of a Union in diffusers layout, and return it."""
    tiny_union(unet, seed, **changes).save_pretrained(folder)
    return folder
