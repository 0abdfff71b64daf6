"""Chroma's transformer: configuration and manifest.

It is Flux.1's (`flux_dit`) without the layers that make its modulation: no time, guidance and pooled text are embedded,
and no block has a layer for its shift, scale and gate. What else is unusual about it:
- an approximator makes all vectors of modulation from sinusoids of the time, of a guidance of 0, and of each vector's
  number: three for each block of one stream, then six for the image in each block of two, then six for the text, then
  shift and scale of the head, in this order;
- T5 does not see padding, and of the padding the transformer sees the first token alone.

Source: diffusers' class, whose defaults are published as Chroma1-HD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import diffusion_transformer, flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "ChromaTransformer2DModel"
APPROXIMATOR = "distilled_guidance_layer."
RMS_EPS = 1.1920929e-07  # torch's for a norm without one, of float32
_FIXED: dict[str, object] = {"in_files": False, "min": 0}


@dataclass(frozen=True, kw_only=True)
class ChromaConfig(FluxConfig):
    """The fields of `transformer/config.json`. Defaults: Chroma1-HD."""

    pooled_projection_dim: int = field(default=0, metadata=_FIXED)
    guidance_embeds: bool = field(default=False, metadata=_FIXED)
    approximator_num_channels: int = 64
    approximator_hidden_dim: int = 5120
    approximator_layers: int = field(default=5, metadata={"max": 1000})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.approximator_num_channels % 8:
            raise ModelError(f"approximator_num_channels {self.approximator_num_channels} is not a multiple of 8")

    @property
    def modulates(self) -> bool:
        return False

    @property
    def vectors(self) -> int:
        """The number of vectors of modulation."""
        return 3 * self.num_single_layers + 12 * self.num_layers + 2


def manifest(config: ChromaConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    inner, count = config.approximator_hidden_dim, config.approximator_layers
    layer = diffusion_transformer.vector_embedding("it", inner, inner)
    approximator = params.merge(
        params.linear("in_proj", inner, config.approximator_num_channels),
        params.repeat("layers", count, {name.removeprefix("it."): shape for name, shape in layer.items()}),
        {f"norms.{i}.weight": (inner,) for i in range(count)},
        params.linear("out_proj", config.dim, inner),
    )
    return params.merge(
        flux_dit.blocks(config),
        params.under(APPROXIMATOR.rstrip("."), approximator),
        params.linear("proj_out", config.out_features, config.dim),
    )


def uses(stored: Manifest) -> ParamUses:
    """Return all of `stored`, in its shapes. The approximator is in memory once per schedule."""
    return {
        key: ParamUse(shape, residency=ONCE if key.startswith(APPROXIMATOR) else ALWAYS)
        for key, shape in stored.items()
    }


NETWORK = replace(
    flux_dit.NETWORK,
    name="chroma_dit",
    kind=CLASS_NAME,
    config=ChromaConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    rename=lambda key: key,
    mflux_signs=(),
    picture_input="",
    lora_widths=lambda stored: {},
    lacking=lambda stored: {},
    traced=(
        *(one for one in flux_dit.NETWORK.traced if one.name in ("block", "single_block", "start", "model")),
        Block(name="modulation", paths=re.compile("distilled_guidance_layer"), once=True),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
    ),
)
