"""LongCat-Image's transformer: configuration and manifest.

It is Flux.1's (`flux_dit`) with ten blocks of two streams and twenty of one. What else is unusual about it:
- modulation depends on the timestep alone: there is no pooled text, and no input for guidance;
- text tokens count: the i-th of S stands at (0, i, i), and images begin behind the last of them: the one that is drawn
  at (1, S + row, S + column), the one that is edited at (2, S + row, S + column);
- pads are text as all other tokens are.

Source: diffusers' class, and the numbers of blocks in the technical report (arXiv:2512.07584) and in ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig

CLASS_NAME = "LongCatImageTransformer2DModel"
_OURS, _THEIRS = "time_text_embed.", "time_embed."
_UNUSED = "pooled_projection_dim"  # in the published configuration, without a meaning
_FIXED: dict[str, object] = {"in_files": False}


@dataclass(frozen=True, kw_only=True)
class LongCatConfig(FluxConfig):
    """The fields of `transformer/config.json`. Defaults: the published 6 B models."""

    out_channels: int | None = field(default=None, metadata=_FIXED)
    num_layers: int = field(default=10, metadata={"max": 1000})
    num_single_layers: int = field(default=20, metadata={"max": 1000})
    joint_attention_dim: int = 3584
    pooled_projection_dim: int = field(default=0, metadata=_FIXED | {"min": 0})
    guidance_embeds: bool = field(default=False, metadata=_FIXED)

    @property
    def counts_text(self) -> bool:
        return True


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `LongCatConfig` from a config.json."""
    return {key: value for key, value in data.items() if key != _UNUSED}


def rename(key: str) -> str:
    """Return the manifest key of a file's key in diffusers' names."""
    return _OURS + key.removeprefix(_THEIRS) if key.startswith(_THEIRS) else key


def published(name: str) -> str:
    """Return the name of a parameter in published files."""
    return _THEIRS + name.removeprefix(_OURS) if name.startswith(_OURS) else name


NETWORK = replace(
    flux_dit.NETWORK,
    name="longcat_dit",
    kind=CLASS_NAME,
    config=LongCatConfig,
    fields=fields,
    rename=rename,
    published=published,
    described=lambda config: {_UNUSED: config.joint_attention_dim},
    mflux_signs=(),
    picture_input="",
    lora_widths=lambda stored: {},
    lacking=lambda stored: {},
)
