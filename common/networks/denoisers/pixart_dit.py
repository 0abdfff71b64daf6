"""PixArt's transformer, of PixArt-alpha and PixArt-Sigma: configuration and manifest.

What is unusual about it:
- one layer makes shift, scale and gate of all blocks from the time (adaLN-single); each block adds a table of its own;
- text is no part of the stream: each block attends to it from the stream as it is, without norm, modulation or gate;
- no token sees the text's padding;
- PixArt-alpha for 1024 pixels embeds the picture's height, width and their ratio, and adds that to the embedded time;
- positions are sines and cosines of the place in the picture, as a share of its side: they are the same at its edges
  whatever its size, and are in no file of diffusers;
- it predicts the noise and, in as many channels again, a variance that no sampler here uses;
- patches are cut by a 2 x 2 convolution, and put together in the order (dy, dx, c).

Source: J. Chen et al., "PixArt-alpha" (2023) and "PixArt-Sigma" (2024); the reference class of diffusers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, feed_forward, vector_embedding
from qwenimg.common.networks.network import Network

CLASS_NAME = "PixArtTransformer2DModel"
OLDER_CLASS_NAME = "Transformer2DModel"  # in the published files

PATCH = 2  # latents a side of a token
CONDITION_CHANNELS = 256  # of the sinusoids of the time and of the sizes
MLP_RATIO = 4
HEAD_EPS = 1e-6  # of the last norm
SIZES = ("resolution_embedder", "aspect_ratio_embedder")
TABLE = "scale_shift_table"
MOST_BLOCKS = 100
_MICRO_CONDITIONED = 128  # sample size of the models that see the picture's size, unless they state it
_ONLY: dict[str, object] = {
    "patch_size": PATCH,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_type": "default",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
}
"""The values that are supported."""


@dataclass(frozen=True, kw_only=True)
class PixArtConfig:
    """The fields of `transformer/config.json`. Defaults: PixArt-Sigma for 1024 pixels."""

    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    attention_head_dim: int = field(default=72, metadata={"max": 1024})
    in_channels: int = 4
    out_channels: int | None = 8
    num_layers: int = field(default=28, metadata={"max": MOST_BLOCKS})
    cross_attention_dim: int = 1152
    caption_channels: int = 4096
    sample_size: int = field(default=128, metadata={"max": 2048})
    patch_size: int = PATCH
    norm_eps: float = 1e-6
    interpolation_scale: float | None = None
    use_additional_conditions: bool | None = None
    activation_fn: str = "gelu-approximate"
    attention_bias: bool = True
    attention_type: str = "default"
    norm_type: str = "ada_norm_single"
    norm_elementwise_affine: bool = False

    def __post_init__(self) -> None:
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                raise ModelError(f"{name} is {clean(getattr(self, name), 40)!r}: not supported; expected {only!r}")
        if self.cross_attention_dim != self.dim:
            raise ModelError(
                f"cross_attention_dim {self.cross_attention_dim} must be the width of the stream, num_attention_heads "
                f"{self.num_attention_heads} * attention_head_dim {self.attention_head_dim}"
            )
        if self.dim % 4 or (self.sees_size and self.dim % 3):
            raise ModelError(
                f"the width of the stream is {self.dim}: not a multiple of 4, and of 3 with use_additional_conditions"
            )
        if self.outputs not in (self.in_channels, 2 * self.in_channels):
            raise ModelError(f"out_channels {self.outputs} must be in_channels {self.in_channels}, or twice as many")
        if not (self.norm_eps > 0 and self.scale > 0 and self.sample_size >= PATCH):
            raise ModelError("norm_eps, interpolation_scale or sample_size is out of range")

    @property
    def dim(self) -> int:
        """The width of the stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        return MLP_RATIO * self.dim

    @property
    def outputs(self) -> int:
        """The channels of the result: noise, and a variance in most models."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def sees_size(self) -> bool:
        """True if the size of the picture is an input."""
        if self.use_additional_conditions is None:
            return self.sample_size == _MICRO_CONDITIONED
        return self.use_additional_conditions

    @property
    def scale(self) -> float:
        """The divisor of positions."""
        return max(self.sample_size // 64, 1) if self.interpolation_scale is None else self.interpolation_scale

    @property
    def base(self) -> int:
        """The tokens along a side of the pictures that positions are counted in."""
        return self.sample_size // PATCH


def manifest(config: PixArtConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout; tables of modulation have
    `.weight` after their keys (see `rename`)."""
    dim, emb = config.dim, "adaln_single.emb"
    block = params.merge(
        {f"{TABLE}.weight": (6, dim)},
        *(attention(name, dim) for name in ("attn1", "attn2")),
        feed_forward("ff", dim, config.hidden),
    )
    sizes = (vector_embedding(f"{emb}.{name}", dim // 3, CONDITION_CHANNELS) for name in SIZES if config.sees_size)
    return params.merge(
        params.conv("pos_embed.proj", dim, config.in_channels, PATCH, PATCH),
        vector_embedding(f"{emb}.timestep_embedder", dim, CONDITION_CHANNELS),
        *sizes,
        params.linear("adaln_single.linear", 6 * dim, dim),
        vector_embedding("caption_projection", dim, config.caption_channels),
        params.repeat("transformer_blocks", config.num_layers, block),
        {f"{TABLE}.weight": (2, dim)},
        params.linear("proj_out", PATCH**2 * config.outputs, dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key."""
    return f"{key}.weight" if key.endswith(TABLE) else key


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return name.removesuffix(".weight") if name.endswith(f"{TABLE}.weight") else name


NETWORK = Network(
    name="pixart_dit",
    role="transformer",
    kind=CLASS_NAME,
    older_kind=OLDER_CLASS_NAME,
    config=PixArtConfig,
    manifest=manifest,
    # of training, of other models of the older class, and of norms without weights
    ignored=frozenset({"dropout", "norm_num_groups", "num_embeds_ada_norm"}),
    blocks=re.compile(r"transformer_blocks\.(\d+)\.(?:attn\d|ff)\..*\.weight"),
    streamable=re.compile(r"(transformer_blocks\.\d+)\."),
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    tables=frozenset({f"{TABLE}.weight", *(f"transformer_blocks.{i}.{TABLE}.weight" for i in range(MOST_BLOCKS))}),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile("adaln_single")),
        Block(name="sizes", paths=re.compile(r"adaln_single\.emb"), method="sizes"),
        Block(name="start", paths=re.compile("caption_projection")),
        Block(name="head", paths=re.compile("proj_out")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    architectures=frozenset({"pixart"}),
)
