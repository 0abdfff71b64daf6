"""Hunyuan-DiT's transformer: configuration and manifest.

What is unusual about it:
- the second half of the blocks takes, besides the stream, that behind a block of the first half, the last one first
  (a U-Net's skips): both are joined, normed and made one by a layer;
- a block has a shift by the time after its first norm, and no scale or gate; its other norms have gains and biases;
- queries and keys have layer norms with biases. Queries are rotated also where they attend to the text, whose keys are
  not;
- text has two encoders: BERT's states, and T5's behind two layers. States of padding are replaced by a learned table
  with a row for each place, and all places are attended to;
- an attention pools T5's states, padding included, to a vector that is added to the embedded time;
- versions 1.0 and 1.1 add to it a style, of which there is one, and sizes: of the picture from which a picture of the
  training was cut, its own, and where; here 1024 x 1024, the picture's, and 0, 0;
- places in the picture are counted in a square of 32, into whose middle the picture is fit: see `hunyuan_conditioning`;
- it predicts v and, in as many channels again, a variance that no sampler here uses;
- patches are cut by a 2 x 2 convolution, and put together in the order (dy, dx, c).

Source: Z. Li et al., "Hunyuan-DiT: A Powerful Multi-Resolution Diffusion Transformer with Fine-Grained Chinese
Understanding" (2024); the reference class of diffusers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import feed_forward, vector_embedding
from qwenimg.common.networks.network import Network

CLASS_NAME = "HunyuanDiT2DModel"

PATCH = 2  # latents a side of a token
CONDITION_CHANNELS = 256  # of the sinusoids of the time and of each size
SIZES = 6
POOL_HEADS = 8
QK_EPS, NORM_EPS = 1e-6, 1e-6
EMB, PADDING, PLACES = "time_extra_emb", "text_embedding_padding", "positional_embedding"
_TABLES = (PADDING, f"{EMB}.pooler.{PLACES}")  # tensors without `.weight` after their names
_ONLY: dict[str, object] = {
    "patch_size": PATCH,
    "activation_fn": "gelu-approximate",
    "norm_type": "layer_norm",
    "learn_sigma": True,
}
"""The values that are supported."""


@dataclass(frozen=True, kw_only=True)
class HunyuanConfig:
    """The fields of `transformer/config.json`. Defaults: Hunyuan-DiT 1.2."""

    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    attention_head_dim: int = field(default=88, metadata={"max": 1024})
    in_channels: int = 4
    num_layers: int = field(default=40, metadata={"max": 100})
    hidden_size: int = 1408
    mlp_ratio: float = 4.3637
    cross_attention_dim: int = 1024
    cross_attention_dim_t5: int = 2048
    pooled_projection_dim: int = 1024
    text_len: int = field(default=77, metadata={"min": 2, "max": 4096})
    text_len_t5: int = field(default=256, metadata={"min": 2, "max": 4096})
    sample_size: int = field(default=128, metadata={"max": 2048})
    use_style_cond_and_image_meta_size: bool = False
    patch_size: int = PATCH
    activation_fn: str = "gelu-approximate"
    norm_type: str = "layer_norm"
    learn_sigma: bool = True

    def __post_init__(self) -> None:
        for name, only in _ONLY.items():
            if getattr(self, name) != only:
                raise ModelError(f"{name} is {clean(getattr(self, name), 40)!r}: not supported; expected {only!r}")
        if self.hidden_size != self.num_attention_heads * self.attention_head_dim:
            raise ModelError(
                f"hidden_size {self.hidden_size} must be num_attention_heads {self.num_attention_heads} * "
                f"attention_head_dim {self.attention_head_dim}"
            )
        if self.attention_head_dim % 4 or self.cross_attention_dim_t5 % POOL_HEADS:
            raise ModelError(
                f"attention_head_dim {self.attention_head_dim} is not a multiple of 4, or cross_attention_dim_t5 "
                f"{self.cross_attention_dim_t5} not of {POOL_HEADS}"
            )
        if not (0 < self.mlp_ratio <= 100 and self.inner >= 1 and self.sample_size >= PATCH):
            raise ModelError("mlp_ratio or sample_size is out of range")
        if self.num_layers % 2 and self.num_layers > 1:
            raise ModelError(f"num_layers {self.num_layers} is odd: its halves would have different numbers of skips")

    @property
    def dim(self) -> int:
        """The width of the stream."""
        return self.hidden_size

    @property
    def inner(self) -> int:
        """The width of a feed-forward."""
        return int(self.dim * self.mlp_ratio)

    @property
    def sees_size(self) -> bool:
        """True if sizes and a style are inputs."""
        return self.use_style_cond_and_image_meta_size

    @property
    def extra_dim(self) -> int:
        """The width of all that is added to the embedded time: pooled text, sizes and style."""
        sizes = SIZES * CONDITION_CHANNELS + self.dim if self.sees_size else 0
        return self.pooled_projection_dim + sizes

    def takes_skip(self, layer: int) -> bool:
        """Return whether a block takes the stream behind an earlier one."""
        return layer > self.num_layers // 2

    def gives_skip(self, layer: int) -> bool:
        """Return whether a later block takes the stream behind this one."""
        return layer < self.num_layers // 2 - 1


def manifest(config: HunyuanConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout; tables have `.weight` after
    their keys (see `rename`)."""
    dim, t5, text = config.dim, config.cross_attention_dim_t5, config.cross_attention_dim
    pooler = f"{EMB}.pooler"
    block = params.merge(
        params.affine("norm1.norm", dim),
        params.linear("norm1.linear", dim, dim),
        _attention("attn1", config, dim),
        params.affine("norm2", dim),
        _attention("attn2", config, text),
        params.affine("norm3", dim),
        feed_forward("ff", dim, config.inner),
    )
    skip = params.merge(params.affine("skip_norm", 2 * dim), params.linear("skip_linear", dim, 2 * dim))
    return params.merge(
        params.conv("pos_embed.proj", dim, config.in_channels, PATCH, PATCH),
        {f"{PADDING}.weight": (config.text_len + config.text_len_t5, text)},
        vector_embedding("text_embedder", 4 * t5, t5, text),
        vector_embedding(f"{EMB}.timestep_embedder", dim, CONDITION_CHANNELS),
        {f"{pooler}.{PLACES}.weight": (config.text_len_t5 + 1, t5)},
        *(params.linear(f"{pooler}.{x}_proj", t5, t5) for x in ("q", "k", "v")),
        params.linear(f"{pooler}.c_proj", config.pooled_projection_dim, t5),
        {f"{EMB}.style_embedder.weight": (1, dim)} if config.sees_size else {},
        vector_embedding(f"{EMB}.extra_embedder", 4 * dim, config.extra_dim, dim),
        params.repeat("blocks", config.num_layers, block),
        *(params.under(f"blocks.{i}", skip) for i in range(config.num_layers) if config.takes_skip(i)),
        params.linear("norm_out.linear", 2 * dim, dim),
        params.linear("proj_out", 2 * PATCH**2 * config.in_channels, dim),
    )


def _attention(name: str, config: HunyuanConfig, seen: int) -> Manifest:
    """Return the shapes of an attention to tokens of the width `seen`."""
    dim = config.dim
    return params.merge(
        *(params.linear(f"{name}.to_{x}", dim, width) for x, width in (("q", dim), ("k", seen), ("v", seen))),
        *(params.affine(f"{name}.norm_{x}", config.attention_head_dim) for x in ("q", "k")),
        params.linear(f"{name}.to_out.0", dim, dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key."""
    return f"{key}.weight" if key in _TABLES else key


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return name.removesuffix(".weight") if name.removesuffix(".weight") in _TABLES else name


NETWORK = Network(
    name="hunyuan_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=HunyuanConfig,
    manifest=manifest,
    ignored=frozenset({"dropout"}),
    blocks=re.compile(r"blocks\.(\d+)\.(?:attn\d\.to_|ff\.|skip_linear).*weight"),
    streamable=re.compile(r"(blocks\.\d+)\."),
    compiled=re.compile(r"blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("blocks", config.num_layers, adds=False),
    tables=frozenset({f"{name}.weight" for name in (*_TABLES, f"{EMB}.style_embedder")}),
    traced=(
        Block(name="block", paths=re.compile(r"blocks\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile(rf"{EMB}\.timestep_embedder")),
        Block(name="extra", paths=re.compile(EMB), method="extra"),
        Block(name="start", paths=re.compile("text_embedder")),
        Block(name="head", paths=re.compile("proj_out")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    architectures=frozenset({"hydit"}),
)
