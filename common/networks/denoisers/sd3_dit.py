"""Stable Diffusion 3's transformer (MMDiT): configuration and manifest.

What is unusual about it:
- two streams, image and text, with weights of their own, meet only in the joint attention (image first, then text);
- modulation depends on the timestep and on the pooled text, so each branch of guidance has its own;
- positions are a table of sines and cosines, a tensor of the file; an image takes its middle rows; no RoPE;
- blocks order their modulation (shift, scale, gate); the final norm, and the text's in the last block, order it (scale,
  shift);
- the last block has no feed-forward for text, whose stream ends there;
- SD 3.5 medium has a second attention over image tokens alone in its first blocks, which sees the block's input as the
  joint attention does; three more chunks of modulation are for it;
- q and k go through RMSNorm in SD 3.5, and through none in SD 3;
- patches are cut by a 2 x 2 convolution, and put together in the order (dy, dx, c).

Source: P. Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis" (2024); the published
configurations of SD 3 medium, SD 3.5 medium and SD 3.5 large.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import (
    attention,
    feed_forward,
    joint_attention,
    vector_embedding,
)
from qwenimg.common.networks.network import Network
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "SD3Transformer2DModel"

PATCH = 2
TIME_CHANNELS = 256
MLP_RATIO = 4
NORM_EPS = 1e-6
TABLE = "pos_embed.pos_embed.weight"  # the table of positions, [rows * columns, C]
_STORED_TABLE = "pos_embed.pos_embed"
_TEXT_ONLY = ("attn.to_add_out.", "ff_context.")  # of a block, what the last one does not have


@dataclass(frozen=True, kw_only=True)
class SD3Config:
    """The fields of `transformer/config.json`. Defaults: SD 3 medium."""

    sample_size: int = field(default=128, metadata={"max": 2048})
    patch_size: int = PATCH
    in_channels: int = 16
    out_channels: int = 16
    num_layers: int = field(default=24, metadata={"max": 1000})
    attention_head_dim: int = field(default=64, metadata={"max": 1024})
    num_attention_heads: int = field(default=24, metadata={"max": 1024})
    joint_attention_dim: int = 4096
    caption_projection_dim: int = 1536
    pooled_projection_dim: int = 2048
    pos_embed_max_size: int = field(default=192, metadata={"max": 2048})
    dual_attention_layers: tuple[int, ...] = field(default=(), metadata={"min": 0})
    qk_norm: str | None = None

    def __post_init__(self) -> None:
        if self.patch_size != PATCH:
            raise ModelError(f"patch_size is {self.patch_size}: not supported; expected {PATCH}")
        if self.qk_norm not in (None, "rms_norm"):
            raise ModelError(f"qk_norm is {clean(self.qk_norm, 40)!r}: not supported; expected rms_norm or null")
        if self.caption_projection_dim != self.dim:
            raise ModelError(
                f"caption_projection_dim {self.caption_projection_dim} must be the width of both streams, "
                f"num_attention_heads {self.num_attention_heads} * attention_head_dim {self.attention_head_dim}"
            )
        if self.dim % 4:
            raise ModelError(f"the width of both streams is {self.dim}: not a multiple of 4, as its positions need")
        if any(layer >= self.num_layers for layer in self.dual_attention_layers):
            raise ModelError(
                f"dual_attention_layers {list(self.dual_attention_layers)} must be below num_layers {self.num_layers}"
            )

    @property
    def dim(self) -> int:
        """The width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def out_features(self) -> int:
        """The channels of one predicted token."""
        return PATCH**2 * self.out_channels


def manifest(config: SD3Config) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout; the table of positions has
    `.weight` after its key (see `rename`)."""
    dim = config.dim
    blocks = (
        {f"transformer_blocks.{i}.{k}": v for k, v in _block(config, i).items()} for i in range(config.num_layers)
    )
    return params.merge(
        {TABLE: (1, config.pos_embed_max_size**2, dim)},
        params.conv("pos_embed.proj", dim, config.in_channels, PATCH, PATCH),
        vector_embedding("time_text_embed.timestep_embedder", dim, TIME_CHANNELS),
        vector_embedding("time_text_embed.text_embedder", dim, config.pooled_projection_dim),
        params.linear("context_embedder", dim, config.joint_attention_dim),
        *blocks,
        params.linear("norm_out.linear", 2 * dim, dim),
        params.linear("proj_out", config.out_features, dim),
    )


def uses(stored: Manifest) -> ParamUses:
    """Return all of `stored`, in its shapes, but the table of positions as a matrix. Tensors for the modulation alone
    are in memory once per schedule."""
    return {
        key: ParamUse(shape[1:] if key == TABLE else shape, residency=ONCE if is_modulation(key) else ALWAYS)
        for key, shape in stored.items()
    }


def is_modulation(key: str) -> bool:
    """Return whether `key` only makes the modulation of a schedule, so that it is freed after that."""
    return ".norm1" in key or key.startswith(("time_text_embed.", "norm_out.linear."))


def rename(key: str) -> str:
    """Return the manifest key of a file's key."""
    return TABLE if key == _STORED_TABLE else key


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return _STORED_TABLE if name == TABLE else name


def chunks(config: SD3Config, layer: int) -> tuple[int, int]:
    """Return how many vectors modulate the image stream and the text stream in a block."""
    return (9 if layer in config.dual_attention_layers else 6), (2 if layer == config.num_layers - 1 else 6)


def _block(config: SD3Config, layer: int) -> Manifest:
    dim, (image, text) = config.dim, chunks(config, layer)
    head_dim = config.attention_head_dim if config.qk_norm else None
    block = params.merge(
        params.linear("norm1.linear", image * dim, dim),
        params.linear("norm1_context.linear", text * dim, dim),
        joint_attention("attn", dim, head_dim),
        attention("attn2", dim, head_dim) if layer in config.dual_attention_layers else {},
        *(feed_forward(name, dim, MLP_RATIO * dim) for name in ("ff", "ff_context")),
    )
    last = layer == config.num_layers - 1
    return {key: shape for key, shape in block.items() if not (last and key.startswith(_TEXT_ONLY))}


NETWORK = Network(
    name="sd3_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=SD3Config,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    blocks=re.compile(r"transformer_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(r"(transformer_blocks\.\d+)\."),
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    tables=frozenset({TABLE}),
    optional=frozenset({TABLE}),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(r"transformer_blocks\.\d+"), method="modulation", once=True),
        Block(name="time", paths=re.compile("time_text_embed"), once=True),
        Block(name="start", paths=re.compile("context_embedder")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation", once=True),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    architectures=frozenset({"sd3"}),
)
