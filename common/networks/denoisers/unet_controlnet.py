"""A ControlNet for Stable Diffusion (ControlNetModel): configuration and manifest.

What is unusual about it:
- it is the first half of the UNet once more, up to the mid block, with weights of its own; each result that the up
  blocks of the UNet join, and that of the mid block, goes through a 1x1 convolution and is added to the UNet's;
- it sees the pixels of its picture, from 0 to 1, and no latents: convolutions bring them to the size of the latents,
  where they are added to the result of `conv_in`;
- it is computed in each step, for each branch of guidance with the text of that branch.

Source: the published configurations of ControlNet 1.1 for Stable Diffusion 1.5 and of ControlNets for SDXL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import unet
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.network import Network

ORDERS = ("rgb", "bgr")
_UP = {"DownBlock2D": "UpBlock2D", "CrossAttnDownBlock2D": "CrossAttnUpBlock2D"}


@dataclass(frozen=True, kw_only=True)
class UNetControlNetConfig(UNetConfig):
    """The UNet's fields in `config.json` after `fields`; the up blocks mirror the down blocks."""

    conditioning_channels: int = field(default=3, metadata={"max": 4})  # of the picture
    conditioning_embedding_out_channels: tuple[int, ...] = (16, 32, 96, 256)
    controlnet_conditioning_channel_order: str = ORDERS[0]
    global_pool_conditions: bool = False  # its results are means over all pixels

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.controlnet_conditioning_channel_order not in ORDERS:
            order = clean(self.controlnet_conditioning_channel_order, 40)
            raise ModelError(f"controlnet_conditioning_channel_order {order!r} is not supported; expected rgb or bgr")
        if self.conditioning_channels != 3:
            raise ModelError(f"conditioning_channels is {self.conditioning_channels}; pictures have 3")
        if not 1 <= len(self.conditioning_embedding_out_channels) <= 8:
            count = len(self.conditioning_embedding_out_channels)
            raise ModelError(f"conditioning_embedding_out_channels has {count} entries; expected 1 to 8")

    @property
    def scale(self) -> int:
        """The pixels to a latent that its convolutions of the picture expect."""
        return int(2 ** (len(self.conditioning_embedding_out_channels) - 1))


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `UNetControlNetConfig` from a config.json. Raises ModelError for an unsupported value."""
    down = data.get("down_block_types", UNetConfig.down_block_types)
    kinds = down if isinstance(down, (list, tuple)) else ()
    return unet.unet_fields({**data, "up_block_types": [_UP.get(str(kind), kind) for kind in reversed(kinds)]})


def manifest(config: UNetControlNetConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    mid, skips = config.block_out_channels[-1], enumerate(config.skips)
    return params.merge(
        unet.half(config),
        params.under("controlnet_cond_embedding", _embedding(config)),
        *(params.conv(f"controlnet_down_blocks.{i}", width, width, 1, 1) for i, (width, _) in skips),
        params.conv("controlnet_mid_block", mid, mid, 1, 1),
    )


def _embedding(config: UNetControlNetConfig) -> Manifest:
    widths = config.conditioning_embedding_out_channels
    pairs = [pair for a, b in pairwise(widths) for pair in ((a, a), (a, b))]
    return params.merge(
        params.conv("conv_in", widths[0], config.conditioning_channels, 3, 3),
        *(params.conv(f"blocks.{i}", outputs, inputs, 3, 3) for i, (inputs, outputs) in enumerate(pairs)),
        params.conv("conv_out", config.block_out_channels[0], widths[-1], 3, 3),
    )


NETWORK = Network(
    name="unet_controlnet",
    role="transformer",
    kind="ControlNetModel",
    config=UNetControlNetConfig,
    manifest=manifest,
    used=lambda config, stored: unet.uses(stored),
    fields=fields,
    ignored=unet.IGNORED_CONFIG,
    blocks=unet.NETWORK.blocks,
    streamable=unet.NETWORK.streamable,
    compiled=unet.NETWORK.compiled,
    traced=(
        *(block for block in unet.NETWORK.traced if block.name not in ("end", "model")),
        Block(name="start", paths=re.compile(r"conv_in|controlnet_cond_embedding"), image=True),
        Block(name="result", paths=re.compile(r"controlnet_(down_blocks\.\d+|mid_block)"), image=True),
    ),
)
