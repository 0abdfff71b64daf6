"""Flux.1's transformer: configuration and manifest.

What is unusual about it:
- blocks of two streams, image and text, then twice as many of one stream over both, whose attention and feed-forward
  run side by side and share one projection out;
- modulation depends on the timestep, on the pooled text, and in dev on the guidance: a quarter of all parameters, used
  once for each of these;
- blocks order their modulation (shift, scale, gate), the final norm orders it (scale, shift);
- RoPE turns adjacent pairs by (0, row, column) from the corner; all text stands at (0, 0, 0);
- the rows of the text that are only padding are read like all others;
- Kontext sees a reference as further tokens of the image, at (1, row, column); Fill sees the latents of the image
  without its masked part, and each pixel of the mask, as further channels of each token; Canny and Depth see the
  latents of a control picture so.

Source: the published configurations of FLUX.1-schnell and FLUX.1-dev.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import diffusion_transformer
from qwenimg.common.networks.network import Network
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "FluxTransformer2DModel"

TIME_CHANNELS = 256
NORM_EPS = 1e-6
PATCH = 2  # of the latents, which the pipeline packs; the transformer's own patches are single tokens
ROPE_THETA = 10000.0
_BLOCK = r"(?:single_)?transformer_blocks\.(?:\d+)"
_MFLUX = re.compile(r"(transformer_blocks\.\d+\.ff(?:_context)?)\.(linear[12])\.(.+)")
_FEED_FORWARD = {"linear1": "net.0.proj", "linear2": "net.2"}  # by mflux's names


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """The fields of `transformer/config.json`. Defaults: the published 12 B models."""

    patch_size: int = 1
    in_channels: int = 64
    out_channels: int | None = None
    num_layers: int = field(default=19, metadata={"max": 1000})
    num_single_layers: int = field(default=38, metadata={"max": 1000})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=24, metadata={"max": 1024})
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)

    def __post_init__(self) -> None:
        if self.patch_size != 1:
            raise ModelError(f"patch_size is {self.patch_size}: not supported; expected 1")
        if len(self.axes_dims_rope) != 3 or sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ModelError(
                f"axes_dims_rope {list(self.axes_dims_rope)} must be three numbers that add up to "
                f"attention_head_dim {self.attention_head_dim}"
            )
        if any(axis % 2 for axis in self.axes_dims_rope):
            raise ModelError(f"axes_dims_rope {list(self.axes_dims_rope)} must be even numbers")

    @property
    def dim(self) -> int:
        """The width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        return 4 * self.dim

    @property
    def out_features(self) -> int:
        """The channels of one predicted token."""
        return self.out_channels or self.in_channels

    @property
    def modulates(self) -> bool:
        """True if blocks and head have layers for their own modulation."""
        return True

    @property
    def counts_text(self) -> bool:
        """True if text tokens have positions of their own, behind which those of images begin."""
        return False

    def seeing(self, channels: int) -> FluxConfig:
        """Return the configuration for tokens of `channels`, of which the first are the image's."""
        return (
            self
            if channels == self.in_channels
            else replace(self, in_channels=channels, out_channels=self.out_features)
        )


def manifest(config: FluxConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    return params.merge(
        trunk(config),
        params.linear("norm_out.linear", 2 * config.dim, config.dim),
        params.linear("proj_out", config.out_features, config.dim),
    )


def trunk(config: FluxConfig) -> Manifest:
    """Return the shapes of the embedders and of the blocks, which its ControlNets have too."""
    dim, embed, pooled = config.dim, "time_text_embed", config.pooled_projection_dim
    guidance = diffusion_transformer.vector_embedding(f"{embed}.guidance_embedder", dim, TIME_CHANNELS)
    return params.merge(
        diffusion_transformer.vector_embedding(f"{embed}.timestep_embedder", dim, TIME_CHANNELS),
        guidance if config.guidance_embeds else {},
        diffusion_transformer.vector_embedding(f"{embed}.text_embedder", dim, pooled) if pooled else {},
        blocks(config),
    )


def blocks(config: FluxConfig) -> Manifest:
    """Return the shapes of the embedders of tokens and of the blocks."""
    return params.merge(
        params.linear("context_embedder", config.dim, config.joint_attention_dim),
        params.linear("x_embedder", config.dim, config.in_channels),
        params.repeat("transformer_blocks", config.num_layers, _double_block(config)),
        params.repeat("single_transformer_blocks", config.num_single_layers, _single_block(config)),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    layer = _MFLUX.fullmatch(key)
    return f"{layer[1]}.{_FEED_FORWARD[layer[2]]}.{layer[3]}" if layer else key


def uses(stored: Manifest) -> ParamUses:
    """Return all of `stored`, in its shapes. Tensors for the modulation alone are in memory once per schedule."""
    return {key: ParamUse(shape, residency=ONCE if is_modulation(key) else ALWAYS) for key, shape in stored.items()}


def is_modulation(key: str) -> bool:
    """Return whether `key` only makes the modulation of a schedule, so that it is freed after that."""
    return ".norm1" in key or ".norm.linear." in key or key.startswith(("time_text_embed.", "norm_out.linear."))


def lora_widths(stored: Manifest) -> dict[str, tuple[int, ...]]:
    """Return the other numbers of channels of a token that LoRAs are made for: those of an image alone, or of an image
    and a control picture where a token is an image's."""
    taken, alone = stored["x_embedder.weight"][1], stored["proj_out.weight"][0]
    return {"x_embedder.weight": (2 * alone,) if taken == alone else (alone,)}


def lacking(stored: Manifest) -> Manifest:
    """Return the embedding of guidance, which schnell is without: LoRAs for dev change it."""
    there = {
        key.replace("timestep", "guidance"): shape for key, shape in stored.items() if ".timestep_embedder." in key
    }
    return {key: shape for key, shape in there.items() if key not in stored}


def _double_block(config: FluxConfig) -> Manifest:
    dim = config.dim
    norms = ("norm1.linear", "norm1_context.linear") if config.modulates else ()
    return params.merge(
        *(params.linear(norm, 6 * dim, dim) for norm in norms),
        diffusion_transformer.joint_attention("attn", dim, config.attention_head_dim),
        diffusion_transformer.feed_forward("ff", dim, config.hidden),
        diffusion_transformer.feed_forward("ff_context", dim, config.hidden),
    )


def _single_block(config: FluxConfig) -> Manifest:
    dim, hidden = config.dim, config.hidden
    return params.merge(
        params.linear("norm.linear", 3 * dim, dim) if config.modulates else {},
        *(params.linear(f"attn.{name}", dim, dim) for name in ("to_q", "to_k", "to_v")),
        *(params.norm(f"attn.{name}", config.attention_head_dim) for name in ("norm_q", "norm_k")),
        params.linear("proj_mlp", hidden, dim),
        params.linear("proj_out", dim, dim + hidden),
    )


def cached_blocks(config: FluxConfig) -> CachedBlocks:
    """Return all blocks but the first."""
    double = (f"transformer_blocks.{i}" for i in range(1, config.num_layers))
    single = (f"single_transformer_blocks.{i}" for i in range(config.num_single_layers))
    return CachedBlocks(after="transformer_blocks.0", paths=(*double, *single), adds=True)


NETWORK = Network(
    name="flux_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=FluxConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    rename=rename,
    mflux_signs=("transformer_blocks.0.ff.linear1.", "transformer_blocks.0.ff_context.linear1."),
    blocks=re.compile(r"(?:single_)?transformer_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(rf"({_BLOCK})\."),
    compiled=re.compile(_BLOCK),
    cached_blocks=cached_blocks,
    picture_input="x_embedder.weight",
    lora_widths=lora_widths,
    lacking=lacking,
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="single_block", paths=re.compile(r"single_transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(_BLOCK), method="modulation", once=True),
        Block(name="time", paths=re.compile("time_text_embed"), once=True),
        Block(name="start", paths=re.compile("x_embedder|context_embedder")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation", once=True),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"flux"}),
)
