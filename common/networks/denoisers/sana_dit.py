"""SANA's transformer: configuration and manifest.

What is unusual about it:
- a token is one latent, which stands for 32 x 32 pixels;
- attention to the image has no softmax: ReLU of queries and keys, so that its cost grows with the tokens and not with
  their square; attention to the text has one;
- the feed-forward is a depthwise 3x3 convolution over the image between two 1x1 kernels, so that the model needs no
  positions; models for 2K and 4K add sinusoids of them to the first stream;
- one modulation is made from the time for all blocks, to which each adds a table of its own;
- attention to the text reads the stream without a norm before it;
- queries and keys of SANA 1.5 and SANA-Sprint have a norm over all heads; SANA 1.0's have none;
- SANA-Sprint takes guidance as an input, and the time in 0..1.

Source: the reference class of diffusers, and the published configurations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import vector_embedding
from qwenimg.common.networks.network import Network
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "SanaTransformer2DModel"
TIME_CHANNELS = 256
NORM_EPS = 1e-6
QK_EPS = 1e-5  # of the norms of queries and keys, and of the text
QK_NORM = "rms_norm_across_heads"
TABLE = "scale_shift_table"
MOST_BLOCKS = 1000


@dataclass(frozen=True, kw_only=True)
class SanaConfig:
    """The fields of `transformer/config.json`; the defaults are those of SANA 1.0, 1.6B."""

    in_channels: int = 32
    out_channels: int | None = 32
    num_attention_heads: int = field(default=70, metadata={"max": 1024})
    attention_head_dim: int = field(default=32, metadata={"max": 1024})
    num_layers: int = field(default=20, metadata={"max": MOST_BLOCKS})
    num_cross_attention_heads: int = field(default=20, metadata={"max": 1024})
    cross_attention_head_dim: int = field(default=112, metadata={"max": 1024})
    cross_attention_dim: int = 2240
    caption_channels: int = 2304
    mlp_ratio: float = field(default=2.5, metadata={"min": 0.01, "max": 100})
    sample_size: int = field(default=32, metadata={"max": 1024})
    interpolation_scale: float | None = field(default=None, metadata={"min": 0.01, "max": 100})
    guidance_embeds: bool = False
    guidance_embeds_scale: float = field(default=0.1, metadata={"min": 1e-6, "max": 1e6})
    qk_norm: str | None = None
    timestep_scale: float = field(default=1.0, metadata={"min": 1e-6, "max": 1e6})
    patch_size: int = 1
    attention_bias: bool = False
    norm_elementwise_affine: bool = False
    norm_eps: float = NORM_EPS

    def __post_init__(self) -> None:
        expected = {"patch_size": 1, "attention_bias": False, "norm_elementwise_affine": False, "norm_eps": NORM_EPS}
        for name, value in expected.items():
            if (given := getattr(self, name)) != value:
                raise ModelError(f"{name} is {given}: not supported; expected {value}")
        if self.out_channels not in (None, self.in_channels):
            raise ModelError(f"out_channels {self.out_channels} is not in_channels {self.in_channels}")
        if self.qk_norm not in (None, QK_NORM):
            raise ModelError(f"qk_norm is {self.qk_norm!r}: not supported; expected {QK_NORM!r} or null")
        if self.dim % 4:
            raise ModelError(f"a width of {self.dim} channels is no multiple of 4")
        if self.cross_attention_dim != self.dim:
            raise ModelError(f"cross_attention_dim {self.cross_attention_dim} is not the width of {self.dim} channels")

    @property
    def dim(self) -> int:
        """The width of the stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def cross_dim(self) -> int:
        """The width of queries, keys and values in the attention to the text."""
        return self.num_cross_attention_heads * self.cross_attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward behind its gate; a ratio that a file's shapes show is rounded."""
        return int(self.mlp_ratio * self.dim + 1e-6)


def manifest(config: SanaConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout (see `rename`)."""
    dim, hidden = config.dim, config.hidden
    block = params.merge(
        {f"{TABLE}.weight": (6, dim)},
        params.under("attn1", _attention(config, dim, bias=False)),
        params.under("attn2", _attention(config, config.cross_dim, bias=True)),
        params.conv("ff.conv_inverted", 2 * hidden, dim, 1, 1),
        params.conv("ff.conv_depth", 2 * hidden, 1, 3, 3),
        {"ff.conv_point.weight": (dim, hidden, 1, 1)},
    )
    times = ("timestep_embedder", "guidance_embedder") if config.guidance_embeds else ("emb.timestep_embedder",)
    return params.merge(
        params.conv("patch_embed.proj", dim, config.in_channels, 1, 1),
        *(params.linear(f"time_embed.{name}.linear_1", dim, TIME_CHANNELS) for name in times),
        *(params.linear(f"time_embed.{name}.linear_2", dim, dim) for name in times),
        params.linear("time_embed.linear", 6 * dim, dim),
        vector_embedding("caption_projection", dim, config.caption_channels),
        params.norm("caption_norm", dim),
        params.repeat("transformer_blocks", config.num_layers, block),
        {f"{TABLE}.weight": (2, dim)},
        params.linear("proj_out", config.in_channels, dim),
    )


def _attention(config: SanaConfig, inner: int, *, bias: bool) -> Manifest:
    return params.merge(
        *(params.linear(name, inner, config.dim, bias=bias) for name in ("to_q", "to_k", "to_v")),
        *(params.norm(name, inner) for name in ("norm_q", "norm_k") if config.qk_norm),
        params.linear("to_out.0", config.dim, inner),
    )


def uses(config: SanaConfig, stored: Manifest) -> ParamUses:
    """Return the use of each tensor: 1x1 kernels are matrices, which may stay quantized."""
    return {name: ParamUse(shape[:2] if shape[2:] == (1, 1) else shape) for name, shape in stored.items()}


def rename(key: str) -> str:
    """Return the manifest key of diffusers' key: a table is the weight of an embedding here."""
    return f"{key}.weight" if key.endswith(TABLE) else key


def published(name: str) -> str:
    """Return diffusers' name of a name of the manifest."""
    return name.removesuffix(".weight") if name.endswith(f"{TABLE}.weight") else name


NETWORK = Network(
    name="sana_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=SanaConfig,
    manifest=manifest,
    used=uses,
    ignored=frozenset({"dropout"}),
    blocks=re.compile(r"transformer_blocks\.(\d+)\.(?:attn\d\..+|ff\.conv_(?:inverted|point))\.weight"),
    # keys and values of the text are made once, of all blocks
    streamable=re.compile(r"(transformer_blocks\.\d+)\.(?!attn2\.(?:to_[kv]|norm_k)\.)"),
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    tables=frozenset({f"{TABLE}.weight", *(f"transformer_blocks.{i}.{TABLE}.weight" for i in range(MOST_BLOCKS))}),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=1, depth=1),
        Block(name="context", paths=re.compile(r"transformer_blocks\.\d+"), method="context"),
        Block(name="time", paths=re.compile("time_embed")),
        Block(name="start", paths=re.compile(r"patch_embed\.proj|caption_projection")),
        Block(name="head", paths=re.compile("proj_out")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    architectures=frozenset({"sana"}),
)
