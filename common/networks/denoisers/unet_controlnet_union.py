"""A ControlNet Union for SDXL (ControlNetUnionModel): configuration and manifest.

What is unusual about it, beside what is of every ControlNet:
- it keeps to pictures of several kinds, alone or at once: which kinds they are enters with the time, as sinusoids of a
  0 or 1 for each kind, and each picture's mean gets an embedding of its kind;
- that mean, a token, goes through a transformer layer, and what comes of it is added to each pixel of the embedded
  picture. The attention of the layer runs over the batch, not over the tokens, so that of equal rows nothing is left of
  it but its values;
- one picture is scaled at the results, as of every ControlNet; of several each is scaled where it enters.

Source: the published configuration and the reference class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import unet, unet_controlnet
from qwenimg.common.networks.denoisers.unet_controlnet import UNetControlNetConfig
from qwenimg.common.networks.network import Network

KINDS: Mapping[str, int] = {
    "openpose": 0,
    "depth": 1,
    "softedge": 2,
    "lineart": 3,
    "normal": 4,
    "segment": 5,
    "tile": 6,
    "inpaint": 7,
}
"""The rows of `task_embedding` in published files; those without the last two have six."""


@dataclass(frozen=True, kw_only=True)
class UNetControlNetUnionConfig(UNetControlNetConfig):
    """A ControlNet's fields, and the kinds and sizes of its tokens."""

    conditioning_embedding_out_channels: tuple[int, ...] = (48, 96, 192, 384)
    addition_time_embed_dim: int | None = 256
    num_control_type: int = field(default=6, metadata={"max": 64})  # kinds of pictures
    num_trans_channel: int = 320  # of a token
    num_trans_head: int = 8  # without effect
    num_trans_layer: int = field(default=1, metadata={"max": 16})
    num_proj_channel: int = 320  # of what comes of a token

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_trans_channel", "num_proj_channel"):
            if getattr(self, name) != self.block_out_channels[0]:
                raise ModelError(
                    f"{name} is {getattr(self, name)}; expected {self.block_out_channels[0]}, the channels of a picture"
                )
        if self.addition_time_embed_dim is None:
            raise ModelError("addition_time_embed_dim is missing: it gives the sinusoids of a kind")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its kinds of pictures."""
        return tuple(name for name, number in KINDS.items() if number < self.num_control_type)

    @property
    def kind_channels(self) -> int:
        """The number of sinusoids of all kinds."""
        return (self.addition_time_embed_dim or 0) * self.num_control_type


def manifest(config: UNetControlNetUnionConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout but for `rename`."""
    width = config.num_trans_channel
    return params.merge(
        unet_controlnet.manifest(config),
        {"task_embedding.weight": (config.num_control_type, width)},
        params.repeat("transformer_layes", config.num_trans_layer, _layer(width)),
        params.linear("spatial_ch_projs", config.num_proj_channel, width),
        params.linear("control_add_embedding.linear_1", config.time_width, config.kind_channels),
        params.linear("control_add_embedding.linear_2", config.time_width, config.time_width),
    )


def _layer(width: int) -> Manifest:
    return params.merge(
        params.linear("attn.in_proj", 3 * width, width),
        params.linear("attn.out_proj", width, width),
        params.affine("ln_1", width),
        params.linear("mlp.c_fc", unet.MLP_RATIO * width, width),
        params.linear("mlp.c_proj", width, unet.MLP_RATIO * width),
        params.affine("ln_2", width),
    )


def rename(key: str) -> str:
    """Return the name in the manifest of a tensor in diffusers layout."""
    return "task_embedding.weight" if key == "task_embedding" else key.replace(".attn.in_proj_", ".attn.in_proj.")


def published(name: str) -> str:
    """Return the name in diffusers layout of a tensor in the manifest."""
    return "task_embedding" if name == "task_embedding.weight" else name.replace(".attn.in_proj.", ".attn.in_proj_")


NETWORK = Network(
    name="unet_controlnet_union",
    role="transformer",
    kind="ControlNetUnionModel",
    config=UNetControlNetUnionConfig,
    manifest=manifest,
    used=lambda config, stored: unet.uses(stored),
    fields=unet_controlnet.fields,
    ignored=unet.IGNORED_CONFIG,
    blocks=unet.NETWORK.blocks,
    streamable=unet.NETWORK.streamable,
    compiled=unet.NETWORK.compiled,
    tables=frozenset({"task_embedding.weight"}),
    rename=rename,
    published=published,
    traced=(
        *unet_controlnet.NETWORK.traced,
        Block(name="kinds", paths=re.compile(r"control_add_embedding|spatial_ch_projs")),
        Block(name="token", paths=re.compile(r"transformer_layes\.\d+"), streams=1, depth=2),
    ),
)
