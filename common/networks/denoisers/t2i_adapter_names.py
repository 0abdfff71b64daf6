"""T2I-Adapters in files: their authors' names, and diffusers'. In a full one of their authors' all blocks are numbered
in order; a light one has them by bodies."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import count, takewhile

from qwenimg.common.networks.denoisers import t2i_adapter
from qwenimg.common.networks.denoisers.t2i_adapter import FULL, LIGHT, XL, T2IAdapterConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.weights.keys import Place

_BLOCK = re.compile(r"body\.(\d+)\.(?:resnets\.(\d+)\.)?(.+)")


def place(name: str, config: T2IAdapterConfig) -> Place:
    """Return the place of a parameter of a full adapter in a file with its authors' names."""
    name = name.removeprefix("adapter.")
    match = _BLOCK.fullmatch(name)
    if match is None:
        return Place(name)
    body, block, rest = match.groups()
    return Place(f"body.{int(body) * config.num_res_blocks + int(block or 0)}.{rest}")


def light_place(name: str, config: T2IAdapterConfig) -> Place:
    """Return the place of a parameter of a light adapter in a file with its authors' names."""
    return Place(name.removeprefix("adapter.").replace(".resnets.", ".body."))


def _config(shapes: StoredShapes, like: T2IAdapterConfig) -> T2IAdapterConfig:
    """Return the configuration that the tensors of a full adapter show: `like` has its blocks a body."""
    width, patch = shapes.shape("adapter.conv_in.weight", 4)[:2]
    factor = 16 if patch in (256, 768) else 8
    names = (f"adapter.body.{i}.resnets.0.block1.weight" for i in count())
    channels = [shapes.shape(name, 4)[0] for name in takewhile(shapes.__contains__, names)]
    return replace(
        like,
        in_channels=patch // factor**2,
        channels=tuple(channels or [width]),
        downscale_factor=factor,
        adapter_type=XL if factor == 16 else FULL,
    )


def _light(shapes: StoredShapes, like: T2IAdapterConfig) -> T2IAdapterConfig:
    """Return the configuration that the tensors of a light adapter show."""
    names = (f"adapter.body.{i}.out_conv.weight" for i in count())
    channels = [shapes.shape(name, 4)[0] for name in takewhile(shapes.__contains__, names)]
    blocks = (f"adapter.body.0.resnets.{i}.block1.weight" for i in count())
    return replace(
        like,
        in_channels=shapes.shape("adapter.body.0.in_conv.weight", 4)[1] // like.downscale_factor**2,
        channels=tuple(channels[:-1] or channels),  # the last twice
        num_res_blocks=len(list(takewhile(shapes.__contains__, blocks))),
    )


def _any(shapes: StoredShapes, like: T2IAdapterConfig) -> T2IAdapterConfig:
    light = replace(like, adapter_type=LIGHT, channels=tuple(4 * width for width in like.channels))
    return _light(shapes, light) if "adapter.body.0.out_conv.weight" in shapes else _config(shapes, like)


LAYOUTS = Layouts(
    network=t2i_adapter.NETWORK,
    title="Stable Diffusion",
    pth=True,
    config=_any,
    expected="T2I-Adapter of Stable Diffusion, by its authors' or diffusers' names",
    rows=(
        Layout(names="diffusers' names", signs=("adapter.body.0.resnets.0.block1.weight",)),
        Layout(
            names="its authors' names",
            signs=("body.0.body.0.block1.weight", "body.0.out_conv.weight"),
            place=light_place,
        ),
        Layout(names="its authors' names", signs=("conv_in.weight", "body.0.block1.weight"), place=place),
    ),
)
