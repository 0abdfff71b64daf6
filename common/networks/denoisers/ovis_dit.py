"""Ovis-Image's transformer: configuration and manifest.

It is Flux.1's (`flux_dit`) with six blocks of two streams and twenty-seven of one. What else is unusual about it:
- modulation depends on the timestep alone: there is no pooled text, and no input for guidance;
- feed-forwards are gated: the values times SiLU of their gate, whose rows come behind theirs;
- text states are normed first, those of pads, which are zeros, too;
- text tokens count, and the image does not begin behind them: the i-th text token stands at (0, i, i), a token of the
  image at (0, row, column).

Source: diffusers' class, whose defaults are published as Ovis-Image-7B.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qwenimg.common.base.block import Block
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_conditioning import Grid, image_positions
from qwenimg.common.networks.denoisers.flux_dit import ROPE_THETA, FluxConfig
from qwenimg.common.numbers import rope
from qwenimg.common.weights.joined import Join, Joins

CLASS_NAME = "OvisImageTransformer2DModel"
HALVES = ("up_proj", "gate_proj")
"""The layers whose rows a gated layer of two streams, `net.0.proj`, has in this order; its authors have them apart."""
_OURS, _THEIRS = "time_text_embed.timestep_embedder.", "timestep_embedder."
_FIXED: dict[str, object] = {"in_files": False}


@dataclass(frozen=True, kw_only=True)
class OvisConfig(FluxConfig):
    """The fields of `transformer/config.json`. Defaults: Ovis-Image-7B."""

    out_channels: int | None = 64
    num_layers: int = field(default=6, metadata={"max": 1000})
    num_single_layers: int = field(default=27, metadata={"max": 1000})
    joint_attention_dim: int = 2048
    pooled_projection_dim: int = field(default=0, metadata=_FIXED | {"min": 0})
    guidance_embeds: bool = field(default=False, metadata=_FIXED)

    @property
    def hidden(self) -> int:
        """The channels of a feed-forward before the gate is applied: values and gate, four widths each."""
        return 8 * self.dim


def manifest(config: OvisConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim, gated = config.dim, config.hidden // 2
    out = params.merge(*(params.linear(f"{name}.net.2", dim, gated) for name in ("ff", "ff_context")))
    single_out = params.linear("proj_out", dim, dim + gated)
    return {
        **flux_dit.manifest(config),
        **params.norm("context_embedder_norm", config.joint_attention_dim),
        **params.repeat("transformer_blocks", config.num_layers, out),
        **params.repeat("single_transformer_blocks", config.num_single_layers, single_out),
    }


def joins(manifest: Manifest) -> Joins:
    """Return the gated layers that files may have in halves."""
    whole = (name for name in manifest if ".net.0.proj." in name)
    return {name: Join(tuple(name.replace(".proj.", f".{half}.") for half in HALVES)) for name in whole}


def rename(key: str) -> str:
    """Return the manifest key of a file's key in diffusers' names."""
    return _OURS + key.removeprefix(_THEIRS) if key.startswith(_THEIRS) else key


def published(name: str) -> str:
    """Return the name of a parameter in published files."""
    return _THEIRS + name.removeprefix(_OURS) if name.startswith(_OURS) else name


def image_and_text_rope(config: FluxConfig, grids: Sequence[Grid], length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] for the tokens of an image, and [S, D/2] for `length` text tokens."""
    text = np.arange(length)[:, None] * (0, 1, 1)
    first, second = (
        rope.rope_table(positions, config.axes_dims_rope, ROPE_THETA) for positions in (image_positions(grids), text)
    )
    return first, second


NETWORK = replace(
    flux_dit.NETWORK,
    name="ovis_dit",
    kind=CLASS_NAME,
    config=OvisConfig,
    manifest=manifest,
    joins=joins,
    rename=rename,
    published=published,
    mflux_signs=(),
    picture_input="",
    lora_widths=lambda stored: {},
    lacking=lambda stored: {},
    traced=(
        *(one for one in flux_dit.NETWORK.traced if one.name != "start"),
        Block(name="start", paths=re.compile("x_embedder|context_embedder(?:_norm)?")),
    ),
    architectures=frozenset({"flux", "ovis"}),
)
