"""Flux.2's transformer: configuration and manifest.

What is unusual about it:
- blocks with weights for each stream, then blocks with the same weights for both, which they join, text first;
- modulation (shift, scale, gate) is made once per step and is the same for all blocks of a kind; the final norm has its
  own, in the order (scale, shift);
- the latter compute attention and feed-forward side by side: one layer makes q, k, v and both halves of the
  feed-forward, and one layer takes the results of both;
- the feed-forward is SiLU of the first half times the second half;
- no layer has a bias, and no vector of the whole text is an input;
- RoPE turns adjacent pairs by (image, row, column, text token); reference images are tokens after the image's own.

Source: the reference class of diffusers and the published sizes of FLUX.2 and FLUX.2 klein.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import joint_attention, vector_embedding
from qwenimg.common.networks.network import Network

CLASS_NAME = "Flux2Transformer2DModel"
_MFLUX_TIME = "time_guidance_embed.linear_"
_MFLUX_OUT = re.compile(r"^(transformer_blocks\.\d+\.attn)\.to_out\.(?!0\.)")

AXES = 4  # of a position: image, row, column, text token


@dataclass(frozen=True, kw_only=True)
class Flux2Config:
    """The fields of `transformer/config.json`; the defaults are the reference class's."""

    patch_size: int = 1
    in_channels: int = 128
    out_channels: int | None = None
    num_layers: int = field(default=8, metadata={"max": 1000})
    num_single_layers: int = field(default=48, metadata={"max": 1000})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=48, metadata={"max": 1024})
    joint_attention_dim: int = 15360
    timestep_guidance_channels: int = field(default=256, metadata={"max": 2**16})
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = 2000.0
    eps: float = 1e-6
    guidance_embeds: bool = True

    def __post_init__(self) -> None:
        if self.patch_size != 1:
            raise ModelError(f"patch_size is {self.patch_size}: not supported; expected 1, for latents in patches")
        if self.out_channels not in (None, self.in_channels):
            raise ModelError(f"out_channels is {self.out_channels}; expected those of the input, {self.in_channels}")
        axes = self.axes_dims_rope
        if len(axes) != AXES or sum(axes) != self.attention_head_dim or any(axis % 2 for axis in axes):
            raise ModelError(
                f"axes_dims_rope {list(axes)} must be {AXES} even numbers that add up to attention_head_dim "
                f"{self.attention_head_dim}"
            )
        if self.timestep_guidance_channels % 2:
            raise ModelError(f"timestep_guidance_channels {self.timestep_guidance_channels} must be even")
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


def manifest(config: Flux2Config) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim, channels = config.dim, config.timestep_guidance_channels
    embedders = ("timestep_embedder", "guidance_embedder")[: 1 + config.guidance_embeds]
    return params.merge(
        *(vector_embedding(f"time_guidance_embed.{name}", dim, channels, bias=False) for name in embedders),
        _linear("double_stream_modulation_img.linear", 6 * dim, dim),
        _linear("double_stream_modulation_txt.linear", 6 * dim, dim),
        _linear("single_stream_modulation.linear", 3 * dim, dim),
        _linear("x_embedder", dim, config.in_channels),
        _linear("context_embedder", dim, config.joint_attention_dim),
        params.repeat("transformer_blocks", config.num_layers, _double_block(config)),
        params.repeat("single_transformer_blocks", config.num_single_layers, _single_block(config)),
        _linear("norm_out.linear", 2 * dim, dim),
        _linear("proj_out", config.in_channels, dim),
    )


def _linear(name: str, outputs: int, inputs: int) -> Manifest:
    return params.linear(name, outputs, inputs, bias=False)


def _double_block(config: Flux2Config) -> Manifest:
    dim, hidden = config.dim, config.hidden
    feed_forward = _linear("linear_in", 2 * hidden, dim) | _linear("linear_out", dim, hidden)
    return params.merge(
        joint_attention("attn", dim, config.attention_head_dim, bias=False),
        *(params.under(name, feed_forward) for name in ("ff", "ff_context")),
    )


def _single_block(config: Flux2Config) -> Manifest:
    dim, hidden = config.dim, config.hidden
    return params.under(
        "attn",
        _linear("to_qkv_mlp_proj", 3 * dim + 2 * hidden, dim),
        _linear("to_out", dim, dim + hidden),
        params.norm("norm_q", config.attention_head_dim),
        params.norm("norm_k", config.attention_head_dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    key = key.replace(_MFLUX_TIME, "time_guidance_embed.timestep_embedder.linear_")
    return _MFLUX_OUT.sub(r"\1.to_out.0.", key)


def cached_blocks(config: Flux2Config) -> CachedBlocks:
    """Return all blocks but the first."""
    double = (f"transformer_blocks.{i}" for i in range(1, config.num_layers))
    single = (f"single_transformer_blocks.{i}" for i in range(config.num_single_layers))
    return CachedBlocks(after="transformer_blocks.0", paths=(*double, *single), adds=True)


_BLOCK = r"(?:single_)?transformer_blocks\.\d+"

NETWORK = Network(
    name="flux2_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=Flux2Config,
    manifest=manifest,
    rename=rename,
    mflux_signs=(_MFLUX_TIME,),
    blocks=re.compile(r"(?:single_)?transformer_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(rf"({_BLOCK})\."),
    compiled=re.compile(_BLOCK),
    cached_blocks=cached_blocks,
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="single_block", paths=re.compile(r"single_transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(r"(?:double|single)_stream_modulation.*(?<!linear)")),
        Block(name="time", paths=re.compile("time_guidance_embed")),
        Block(name="start", paths=re.compile("x_embedder|context_embedder")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation"),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"flux", "flux2"}),  # programs write the former for both generations
)
