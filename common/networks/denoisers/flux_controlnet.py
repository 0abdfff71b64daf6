"""A ControlNet for Flux.1: configuration and manifest.

What is unusual about it:
- it is a shorter Flux.1 transformer with embedders and blocks of its own, and with a guidance of its own: one made for
  dev sees a guidance beside schnell too;
- the latents of a picture are embedded and added to the start of its image stream;
- it predicts nothing: after each block a linear layer makes a residual of the image stream, those of blocks of two
  streams for several such blocks of the transformer, and the same of one stream, if it has such blocks;
- a Union is told the kind of its picture by a learned token before the text, which stands where all text does.

Source: the published configurations of InstantX's and Shakker Labs' Unions (5 blocks of two streams and 10 of one, 10
kinds of pictures of which 7 are in use), of Union-Pro-2.0 (6 and none, without kinds), and of Jasper's (5 and none).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.network import Network

CLASS_NAME = "FluxControlNetModel"
KINDS: Mapping[str, int] = {
    "canny": 0,
    "lineart": 0,
    "tile": 1,
    "depth": 2,
    "blur": 3,
    "openpose": 4,
    "grey": 5,
    "low-quality": 6,
}
"""The rows of a Union's embedding of kinds that were trained."""
_MODES = "controlnet_mode_embedder"


@dataclass(frozen=True, kw_only=True)
class FluxControlNetConfig(FluxConfig):
    """The fields of its `config.json`. Defaults: the published Union-Pro-2.0."""

    num_layers: int = field(default=6, metadata={"max": 1000})
    num_single_layers: int = field(default=0, metadata={"min": 0, "max": 1000})
    guidance_embeds: bool = True
    num_mode: int | None = field(default=None, metadata={"max": 1000})  # kinds of pictures of a Union
    conditioning_embedding_channels: int | None = None  # of XLabs' networks, which see pixels

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conditioning_embedding_channels is not None:
            raise ModelError(f"conditioning_embedding_channels is {self.conditioning_embedding_channels}: {XLABS}")
        if self.out_features != self.in_channels:
            raise ModelError(f"out_channels is {self.out_channels}: a ControlNet predicts nothing; leave it out")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of its kinds of pictures, none if it is told none."""
        return tuple(name for name, number in KINDS.items() if number < (self.num_mode or 0))


XLABS = "XLabs' ControlNets are not read; give InstantX's, Shakker Labs' or Jasper's"


def manifest(config: FluxControlNetConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim = config.dim
    return params.merge(
        flux_dit.trunk(config),
        params.repeat("controlnet_blocks", config.num_layers, _residual(dim)),
        params.repeat("controlnet_single_blocks", config.num_single_layers, _residual(dim)),
        {f"{_MODES}.weight": (config.num_mode, dim)} if config.num_mode else {},
        params.linear("controlnet_x_embedder", dim, config.in_channels),
    )


def _residual(dim: int) -> Manifest:
    return {"weight": (dim, dim), "bias": (dim,)}


NETWORK = Network(
    name="flux_controlnet",
    role="transformer",
    kind=CLASS_NAME,
    config=FluxControlNetConfig,
    manifest=manifest,
    used=lambda config, stored: flux_dit.uses(stored),
    blocks=flux_dit.NETWORK.blocks,
    streamable=flux_dit.NETWORK.streamable,
    compiled=flux_dit.NETWORK.compiled,
    tables=frozenset({f"{_MODES}.weight"}),
    traced=(
        *(row for row in flux_dit.NETWORK.traced if row.name in ("block", "single_block", "modulation", "time")),
        Block(name="start", paths=re.compile("x_embedder|context_embedder|controlnet_x_embedder")),
        Block(name="residual", paths=re.compile(r"controlnet_(?:single_)?blocks\.\d+")),
        Block(name="model", paths=re.compile("")),
    ),
)
