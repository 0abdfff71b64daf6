"""The UNet of Stable Diffusion in files: the names of its authors, ldm's, and diffusers'.

Unusual about ldm's names: all layers are numbered in order, downsamplers included: block b, layer j of the down blocks
is `input_blocks` number 1 + (layers of the blocks before, each with its downsampler) + j.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.layout import Layout, Layouts
from qwenimg.common.weights.keys import Place

SIGN = "input_blocks.0.0.weight"
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}


_ATTENTION = re.compile(r"(?P<owner>.+\.attn\d)\.(?P<layer>to_[qkv]|to_out)(\.0)?")


def place(name: str, config: UNetConfig) -> Place:
    """Return the place of a parameter in a file with ldm's names."""
    return Place(_key(name, _paths(config)))


@cache
def _paths(config: UNetConfig) -> Mapping[str, str]:
    """Map the path of each part of a block to its path in the file."""
    paths = dict(_UNET_ENDS)
    number = 1
    for i, level in enumerate(config.down):
        for j in range(len(level.resnets)):
            paths[f"down_blocks.{i}.resnets.{j}"] = f"input_blocks.{number}.0"
            paths[f"down_blocks.{i}.attentions.{j}"] = f"input_blocks.{number}.1"
            number += 1
        if level.resampled:
            paths[f"down_blocks.{i}.downsamplers.0.conv"] = f"input_blocks.{number}.0.op"
            number += 1
    number = 0
    for i, level in enumerate(config.up):
        for j in range(len(level.resnets)):
            paths[f"up_blocks.{i}.resnets.{j}"] = f"output_blocks.{number}.0"
            paths[f"up_blocks.{i}.attentions.{j}"] = f"output_blocks.{number}.1"
            number += 1
        paths[f"up_blocks.{i}.upsamplers.0.conv"] = f"output_blocks.{number - 1}.{2 if level.depth else 1}.conv"
    return paths


def _key(name: str, paths: Mapping[str, str]) -> str:
    owner, _, rest = name.rpartition(".")
    while owner not in paths:
        owner, _, part = owner.rpartition(".")
        rest = f"{part}.{rest}"
    if ".resnets." in owner:
        part, _, leaf = rest.rpartition(".")
        rest = f"{_RESNET[part]}.{leaf}"
    return f"{paths[owner]}.{rest}"


def _processor(path: str) -> Iterator[Place]:
    """Yield the name that diffusers wrote until 2023: `attn1.processor.to_q_lora.down.weight`."""
    if match := _ATTENTION.fullmatch(path):
        yield Place(f"{match['owner']}.processor.{match['layer']}")


LAYOUTS = Layouts(
    network=unet.NETWORK,
    title="Stable Diffusion",
    rows=(
        Layout(names="ldm's names", signs=(SIGN,), place=place),
        Layout(names="diffusers' names", signs=("time_embedding.linear_1.weight",)),
    ),
    in_loras=_processor,
)
