"""AuraFlow's transformer: configuration and manifest.

What is unusual about it:
- four blocks of two streams, text and image, then thirty-two of one over both; no layer has a bias, but the embedders
  of patches and time;
- an attention's result is no part of the stream: the feed-forward takes the norm of stream and result together, and its
  own result alone is added to the stream;
- norms have no gain: LayerNorm of the streams, and of each head's queries and keys;
- modulation depends on the timestep alone, and is a third of all parameters, used once for each timestep; the head has
  scale and shift, but no norm;
- eight learned tokens (registers) stand before the text, whose tokens have no positions; those of pads are zeros, and
  are attended like all others;
- positions of the image are a learned table, a tensor of the file; an image takes its middle rows;
- heads are 256 wide; patches are read in the order (c, dy, dx) and written in the order (dy, dx, c).

Source: diffusers' class, whose defaults are published as AuraFlow 0.3 but for the size of the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isqrt

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, joint_attention, vector_embedding
from qwenimg.common.networks.network import Network
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "AuraFlowTransformer2DModel"

PATCH = 2
REGISTERS = 8
TIME_CHANNELS = 256
NORM_EPS = 1e-5
HIDDEN_OF = 256  # the width of a feed-forward is a multiple of it
TABLE, REGISTER_TOKENS = "pos_embed.pos_embed.weight", "register_tokens.weight"
_STORED = {"pos_embed.pos_embed": TABLE, "register_tokens": REGISTER_TOKENS}
_BLOCK = r"(?:joint|single)_transformer_blocks\.\d+"


@dataclass(frozen=True, kw_only=True)
class AuraConfig:
    """The fields of `transformer/config.json`. Defaults: AuraFlow 0.3."""

    sample_size: int = field(default=64, metadata={"max": 2048})
    patch_size: int = PATCH
    in_channels: int = 4
    num_mmdit_layers: int = field(default=4, metadata={"max": 1000})
    num_single_dit_layers: int = field(default=32, metadata={"max": 1000})
    attention_head_dim: int = field(default=256, metadata={"max": 1024})
    num_attention_heads: int = field(default=12, metadata={"max": 1024})
    joint_attention_dim: int = 2048
    caption_projection_dim: int = 3072
    out_channels: int = 4
    pos_embed_max_size: int = field(default=9216, metadata={"max": 2**22})

    def __post_init__(self) -> None:
        if self.patch_size != PATCH:
            raise ModelError(f"patch_size is {self.patch_size}: not supported; expected {PATCH}")
        if self.caption_projection_dim != self.dim:
            raise ModelError(
                f"caption_projection_dim {self.caption_projection_dim} must be the width of both streams, "
                f"num_attention_heads {self.num_attention_heads} * attention_head_dim {self.attention_head_dim}"
            )
        if self.side**2 != self.pos_embed_max_size:
            raise ModelError(f"pos_embed_max_size {self.pos_embed_max_size} is not the square of a number of tokens")

    @property
    def dim(self) -> int:
        """The width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward, of values and gate each."""
        return -(-(8 * self.dim // 3) // HIDDEN_OF) * HIDDEN_OF

    @property
    def side(self) -> int:
        """The rows and columns of the table of positions, in tokens."""
        return isqrt(self.pos_embed_max_size)

    @property
    def features(self) -> int:
        """The channels of one patch."""
        return PATCH**2 * self.in_channels

    @property
    def out_features(self) -> int:
        """The channels of one predicted patch."""
        return PATCH**2 * self.out_channels


def manifest(config: AuraConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout; the table of positions and
    the registers have `.weight` after their key (see `rename`)."""
    dim = config.dim
    return params.merge(
        {TABLE: (1, config.pos_embed_max_size, dim), REGISTER_TOKENS: (1, REGISTERS, dim)},
        params.linear("pos_embed.proj", dim, config.features),
        vector_embedding("time_step_proj", dim, TIME_CHANNELS),
        params.linear("context_embedder", dim, config.joint_attention_dim, bias=False),
        params.repeat("joint_transformer_blocks", config.num_mmdit_layers, _joint_block(config)),
        params.repeat("single_transformer_blocks", config.num_single_dit_layers, _single_block(config)),
        params.linear("norm_out.linear", 2 * dim, dim, bias=False),
        params.linear("proj_out", config.out_features, dim, bias=False),
    )


def uses(stored: Manifest) -> ParamUses:
    """Return all of `stored`, in its shapes, but tables as matrices. Tensors for the modulation alone are in memory
    once per schedule."""
    return {
        key: ParamUse(shape[1:] if key in _STORED.values() else shape, residency=ONCE if is_modulation(key) else ALWAYS)
        for key, shape in stored.items()
    }


def is_modulation(key: str) -> bool:
    """Return whether `key` only makes the modulation of a schedule, so that it is freed after that."""
    return ".norm1" in key or key.startswith(("time_step_proj.", "norm_out.linear."))


def rename(key: str) -> str:
    """Return the manifest key of a file's key."""
    return _STORED.get(key, key)


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return name.removesuffix(".weight") if name in _STORED.values() else name


def cached_blocks(config: AuraConfig) -> CachedBlocks:
    """Return all blocks but the first."""
    joint = (f"joint_transformer_blocks.{i}" for i in range(1, config.num_mmdit_layers))
    single = (f"single_transformer_blocks.{i}" for i in range(config.num_single_dit_layers))
    return CachedBlocks(after="joint_transformer_blocks.0", paths=(*joint, *single), adds=True)


def _joint_block(config: AuraConfig) -> Manifest:
    dim = config.dim
    return params.merge(
        *(params.linear(f"{name}.linear", 6 * dim, dim, bias=False) for name in ("norm1", "norm1_context")),
        joint_attention("attn", dim, bias=False),
        _feed_forward("ff", config),
        _feed_forward("ff_context", config),
    )


def _single_block(config: AuraConfig) -> Manifest:
    return params.merge(
        params.linear("norm1.linear", 6 * config.dim, config.dim, bias=False),
        attention("attn", config.dim, bias=False),
        _feed_forward("ff", config),
    )


def _feed_forward(name: str, config: AuraConfig) -> Manifest:
    dim, hidden = config.dim, config.hidden
    return params.merge(
        *(params.linear(f"{name}.{layer}", hidden, dim, bias=False) for layer in ("linear_1", "linear_2")),
        params.linear(f"{name}.out_projection", dim, hidden, bias=False),
    )


NETWORK = Network(
    name="aura_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=AuraConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    blocks=re.compile(r"(?:joint|single)_transformer_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(rf"({_BLOCK})\."),
    compiled=re.compile(_BLOCK),
    cached_blocks=cached_blocks,
    tables=frozenset({TABLE, REGISTER_TOKENS}),
    traced=(
        Block(name="block", paths=re.compile(r"joint_transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="single_block", paths=re.compile(r"single_transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(_BLOCK), method="modulation", once=True),
        Block(name="time", paths=re.compile("time_step_proj"), once=True),
        Block(name="start", paths=re.compile("context_embedder")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation", once=True),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    architectures=frozenset({"aura"}),
)
