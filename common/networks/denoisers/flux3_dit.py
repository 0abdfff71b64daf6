"""FLUX.3 Image Klein's transformer: configuration and manifest.

What is unusual about it:
- three streams, of the image, of reference images and of text, each with blocks of its own weights that attend within
  the stream alone; then blocks with the same weights for all, which they join;
- every block computes attention and feed-forward side by side, with one norm and one gate;
- modulation (shift, scale, gate) is made once per step for each stream, and is the same for all blocks of a kind; text
  and references have the modulation of time 0, and the final norm has its own, in the order (scale, shift);
- a flow map, which is distilled for few steps, also takes the time that a step goes to, in all three streams;
- the feed-forward is SiLU of the first half times the second half, and no layer has a bias;
- RoPE turns adjacent pairs by (0, half the row, half the column, text token); reference k has the number -k there.

Source: the reference class of diffusers and the published sizes of FLUX.3 Image Klein.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, vector_embedding
from qwenimg.common.networks.network import Network

CLASS_NAME = "Flux3Transformer2DModel"
AXES = 4  # of a position: unused, row, column, text token or reference
STREAMS = ("image", "image_cond", "txt")
TARGET = "target_timestep_embedder"
_MFLUX_OUT = re.compile(r"\.attn\.to_out\.(?!0\.)")


@dataclass(frozen=True, kw_only=True)
class Flux3Config:
    """The fields of `transformer/config.json`; the defaults are the reference class's."""

    in_channels: int = 128
    cond_in_channels: int = 128
    num_layers: int = field(default=5, metadata={"max": 1000})
    num_single_layers: int = field(default=28, metadata={"max": 1000})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=24, metadata={"max": 1024})
    joint_attention_dim: int = 20480
    timestep_channels: int = field(default=256, metadata={"max": 2**16})
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = 10000.0
    eps: float = 1e-6
    flow_map: bool = False

    def __post_init__(self) -> None:
        axes = self.axes_dims_rope
        if len(axes) != AXES or sum(axes) != self.attention_head_dim or any(axis % 2 for axis in axes):
            raise ModelError(
                f"axes_dims_rope {list(axes)} must be {AXES} even numbers that add up to attention_head_dim "
                f"{self.attention_head_dim}"
            )
        if self.cond_in_channels != self.in_channels:
            raise ModelError(
                f"cond_in_channels is {self.cond_in_channels}; expected in_channels, {self.in_channels}: references "
                "are made by the same VAE"
            )
        if self.timestep_channels % 2:
            raise ModelError(f"timestep_channels {self.timestep_channels} must be even")
        if not 0 < self.mlp_ratio <= 64 or not self.hidden:
            raise ModelError(f"mlp_ratio {self.mlp_ratio} gives no width of a feed-forward")
        if not self.eps > 0 or not self.rope_theta > 1:
            raise ModelError(f"eps {self.eps} or rope_theta {self.rope_theta} is out of range")

    @property
    def dim(self) -> int:
        """The width of the streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        return int(self.dim * self.mlp_ratio)


def manifest(config: Flux3Config) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim, block = config.dim, _block(config)
    embedders = ("timestep_embedder", TARGET)[: 1 + config.flow_map]
    kinds = ("early_stream_modulations", "single_stream_modulations")
    return params.merge(
        *(vector_embedding(name, dim, config.timestep_channels, bias=False) for name in embedders),
        *(_linear(f"{kind}.{stream}.linear", 3 * dim, dim) for kind in kinds for stream in STREAMS),
        *(_linear(f"x_embedders.{stream}", dim, config.in_channels) for stream in STREAMS[:2]),
        _linear("context_embedder", dim, config.joint_attention_dim),
        *(params.repeat(f"mode_blocks.{stream}", config.num_layers, block) for stream in STREAMS[:2]),
        params.repeat("txt_mode_blocks", config.num_layers, block),
        params.repeat("single_transformer_blocks", config.num_single_layers, block),
        _linear("norm_out.linear", 2 * dim, dim),
        _linear("proj_out", config.in_channels, dim),
    )


def _linear(name: str, outputs: int, inputs: int) -> Manifest:
    return params.linear(name, outputs, inputs, bias=False)


def _block(config: Flux3Config) -> Manifest:
    dim, hidden = config.dim, config.hidden
    return params.merge(
        attention("attn", dim, config.attention_head_dim, bias=False),
        _linear("ff.linear_in", 2 * hidden, dim),
        _linear("ff.linear_out", dim, hidden),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    return _MFLUX_OUT.sub(".attn.to_out.0.", key)


_OWN = r"(?:mode_blocks\.image(?:_cond)?|txt_mode_blocks)\.\d+"
_SINGLE = r"single_transformer_blocks\.\d+"

NETWORK = Network(
    name="flux3_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=Flux3Config,
    manifest=manifest,
    rename=rename,
    mflux_signs=("mode_blocks.image.0.attn.to_out.weight",),
    blocks=re.compile(r"(?:mode_blocks\.\w+|txt_mode_blocks|single_transformer_blocks)\.(\d+)\..*\.weight"),
    streamable=re.compile(rf"({_OWN}|{_SINGLE})\."),
    compiled=re.compile(rf"{_OWN}|{_SINGLE}"),
    # those of the image alone see nothing of the text
    cached_blocks=lambda config: CachedBlocks.but_first("single_transformer_blocks", config.num_single_layers),
    # A LoRA of the distilled model may change a layer that the base lacks
    lacking=lambda stored: (
        {}
        if f"{TARGET}.linear_1.weight" in stored
        else vector_embedding(TARGET, *stored["timestep_embedder.linear_1.weight"], bias=False)
    ),
    traced=(
        Block(name="block", paths=re.compile(_OWN), streams=1, depth=1),
        Block(name="single_block", paths=re.compile(_SINGLE), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(r"(?:early|single)_stream_modulations\.\w+")),
        Block(name="time", paths=re.compile(r"(?:target_)?timestep_embedder")),
        Block(name="start", paths=re.compile(r"x_embedders\.\w+|context_embedder")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation"),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"flux", "flux3"}),
)
