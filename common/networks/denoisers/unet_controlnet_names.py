"""ControlNets of Stable Diffusion in files: their authors' names, with and without their prefix, and diffusers'."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count, takewhile
from typing import TypeVar

from qwenimg.common.networks.denoisers import unet_controlnet, unet_names
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

Config = TypeVar("Config", bound=UNetControlNetConfig)
PREFIX = "control_model."
_HINT = "input_hint_block.0.weight"
_HINTS = re.compile(r"controlnet_cond_embedding\.(conv_in|conv_out|blocks\.(\d+))\.(\w+)")
_DOWN = re.compile(r"controlnet_down_blocks\.(\d+)\.(\w+)")


def place(name: str, config: UNetControlNetConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names, without their prefix."""
    if match := _HINTS.fullmatch(name):
        part, block, leaf = match.groups()
        last = 2 * len(config.conditioning_embedding_out_channels) - 1
        number = 0 if part == "conv_in" else last if part == "conv_out" else 1 + int(block)
        return Place(f"input_hint_block.{2 * number}.{leaf}")  # activations between them are numbered too
    if match := _DOWN.fullmatch(name):
        return Place(f"zero_convs.{match[1]}.0.{match[2]}")
    if name.startswith("controlnet_mid_block."):
        return Place(f"middle_block_out.0.{name.rpartition('.')[2]}")
    return unet_names.place(name, config)


def _behind_prefix(name: str, config: UNetControlNetConfig) -> Place:
    found = place(name, config)
    return found._replace(key=PREFIX + found.key)


def config_of(shapes: StoredShapes, like: Config) -> Config:
    """Return the configuration of a ControlNet for the UNet of `like`: its latents' channels, and those of
    `picture_widths`."""
    return replace(picture_widths(shapes, like), in_channels=shapes.shape("conv_in.weight", 4)[1])


def picture_widths(shapes: StoredShapes, like: Config) -> Config:
    """Return `like` with the widths of the convolutions of the picture."""
    widths = [shapes.shape("controlnet_cond_embedding.conv_in.weight", 4)[0]]
    names = (f"controlnet_cond_embedding.blocks.{2 * i + 1}.weight" for i in count())
    widths += [shapes.shape(name, 4)[0] for name in takewhile(shapes.__contains__, names)]
    return replace(like, conditioning_embedding_out_channels=tuple(widths))


LAYOUTS = Layouts(
    network=unet_controlnet.NETWORK,
    title="Stable Diffusion",
    pth=True,
    config=config_of,
    expected="ControlNet of Stable Diffusion, by its authors' or diffusers' names",
    foreign={
        "controlnet_x_embedder.weight": "a ControlNet of Qwen-Image or FLUX.1",
        "controlnet_blocks.0.y_rms.weight": "a file of control patches for Qwen-Image",
        "pos_embed_input.proj.weight": "a ControlNet of Stable Diffusion 3",
        "control_all_x_embedder.2-1.weight": "a ControlNet of Z-Image",
        "control_to_base_for_conv_in.weight": "a ControlNet-XS, which is not built: give a ControlNet",
    },
    rows=(
        Layout(names="its authors' names", signs=(PREFIX + _HINT,), place=_behind_prefix),
        Layout(names="its authors' names, without their prefix", signs=(_HINT,), place=place),
        Layout(names="diffusers' names", signs=("controlnet_cond_embedding.conv_in.weight", "conv_in.weight")),
    ),
)
