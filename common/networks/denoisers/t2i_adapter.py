"""A T2I-Adapter for Stable Diffusion (T2IAdapter): configuration and manifest.

What is unusual about it:
- it sees the pixels of its picture alone, neither latents nor time nor text, and is computed once;
- its features are added inside the UNet's down path, one to each down block, so that the next block sees them;
- the adapter of SDXL starts from patches of 16 pixels, halves once, and has a feature for the mid block too.

Source: the published configurations, and the files of their authors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network

FULL, XL, LIGHT = TYPES = ("full_adapter", "full_adapter_xl", "light_adapter")
FACTORS = (8, 16)
SOFT = (0.25, 0.62, 0.825, 1.0)
"""The share of its scale that each feature has where the prompt leads, as in AUTOMATIC1111's extension."""


@dataclass(frozen=True, kw_only=True)
class T2IAdapterConfig:
    """The fields of its `config.json`."""

    in_channels: int = 3  # of the picture
    channels: tuple[int, ...] = (320, 640, 1280, 1280)  # of each feature; a light one has the last twice
    num_res_blocks: int = field(default=2, metadata={"max": 64})
    downscale_factor: int = 8  # the side of a patch
    adapter_type: str = FULL

    def __post_init__(self) -> None:
        if self.adapter_type not in TYPES:
            raise ModelError(f"adapter_type {clean(self.adapter_type, 40)!r} is not one of {', '.join(TYPES)}")
        if self.in_channels not in (1, 3):
            raise ModelError(f"in_channels is {self.in_channels}; pictures have 1 or 3")
        if self.downscale_factor not in FACTORS:
            raise ModelError(f"downscale_factor is {self.downscale_factor}; expected 8 or 16")
        if not 1 <= len(self.channels) <= 16:
            raise ModelError(f"channels has {len(self.channels)} entries; expected 1 to 16")
        if any(channels % 4 for channels in self.channels) and self.is_light:
            raise ModelError(f"channels are {clean(self.channels, 60)}; those of a light adapter are multiples of 4")
        if self.adapter_type == XL and any(a != b for a, b in zip(self.channels[2:], self.channels[3:], strict=False)):
            raise ModelError(f"channels are {clean(self.channels, 60)}; after the third those of XL are the same")

    @property
    def is_light(self) -> bool:
        return self.adapter_type == LIGHT

    @property
    def bodies(self) -> tuple[tuple[int, int, bool], ...]:
        """Each body: channels in and out, and whether it halves the sides first."""
        first = self.in_channels * self.downscale_factor**2 if self.is_light else self.channels[0]
        widths = (*self.channels, self.channels[-1]) if self.is_light else self.channels
        halving = (2,) if self.adapter_type == XL else range(1, len(widths))
        return tuple((a, b, i in halving) for i, (a, b) in enumerate(pairwise((first, *widths))))

    def features(self, scale: int) -> list[tuple[int, int]]:
        """Return the channels of each feature, and how often its sides are halves of the latents'. scale: the pixels to
        a latent."""
        halved, found = int(log2(self.downscale_factor / scale)), []
        for _, width, halves in self.bodies:
            halved += halves
            found.append((width, halved))
        return found


def manifest(config: T2IAdapterConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    patch = config.in_channels * config.downscale_factor**2
    first = {} if config.is_light else params.conv("adapter.conv_in", config.channels[0], patch, 3, 3)
    bodies = (
        params.under(f"adapter.body.{i}", _body(config, inputs, outputs))
        for i, (inputs, outputs, _) in enumerate(config.bodies)
    )
    return params.merge(first, *bodies)


def _body(config: T2IAdapterConfig, inputs: int, outputs: int) -> Manifest:
    width, kernel = (outputs // 4, 3) if config.is_light else (outputs, 1)
    block = params.merge(params.conv("block1", width, width, 3, 3), params.conv("block2", width, width, kernel, kernel))
    return params.merge(
        params.conv("in_conv", width, inputs, 1, 1) if config.is_light or inputs != outputs else {},
        params.repeat("resnets", config.num_res_blocks, block),
        params.conv("out_conv", outputs, width, 1, 1) if config.is_light else {},
    )


NETWORK = Network(
    name="t2i_adapter",
    role="transformer",
    kind="T2IAdapter",
    config=T2IAdapterConfig,
    manifest=manifest,
    compiled=re.compile(r"adapter\.body\.\d+\.resnets\.\d+"),
    traced=(Block(name="body", paths=re.compile(r"adapter\.body\.\d+"), image=True),),
)
