"""Lumina-Image 2.0's transformer (Unified Next-DiT): configuration and manifest. Z-Image's is made of its blocks.

What is unusual about it, besides what both have (`zimage_dit`):
- queries share heads of keys and values;
- no token is a pad: text is as long as its prompt, and the image's frame is the length of the text;
- its time input is 1 - sigma, in 0..1: the sinusoid's angles are a thousandth of Z-Image's;
- modulation comes from the time's whole embedding, with a SiLU before it in all blocks.

Source: the reference class of diffusers, and the configuration of Lumina-Image 2.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.diffusion_transformer import vector_embedding
from qwenimg.common.networks.denoisers.zimage_dit import PATCH, TIME_CHANNELS, TIME_WIDTH, BlockSizes
from qwenimg.common.networks.layout import flipped, with_parts, with_start
from qwenimg.common.networks.network import Network

CLASS_NAME = "Lumina2Transformer2DModel"
ROPE_THETA = 10000.0
_OURS: dict[str, Any] = {"in_files": False}  # has another name in config.json
_FIELDS = {
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_refiner_layers": "n_refiner_layers",
    "num_attention_heads": "n_heads",
    "num_kv_heads": "n_kv_heads",
    "axes_dim_rope": "axes_dims",
}
# Starts of names, and parts of the names of blocks, that diffusers has for those here; the first that fits counts
_STARTS = {
    "t_embedder.": "time_caption_embed.timestep_embedder.",
    "cap_embedder.": "time_caption_embed.caption_embedder.",
    "final_layer.adaLN_modulation.1.": "norm_out.linear_1.",
    "final_layer.linear.": "norm_out.linear_2.",
}
_PARTS = {
    ".attention.": ".attn.",
    ".feed_forward.w": ".feed_forward.linear_",
    ".adaLN_modulation.0.": ".norm1.linear.",
    ".attention_norm1.": ".norm1.norm.",
    ".attention_norm2.": ".norm2.",
}


@dataclass(frozen=True, kw_only=True)
class LuminaConfig(BlockSizes):
    """The fields of `transformer/config.json`, by Z-Image's names; the defaults are the published 2.6 B model's."""

    patch_size: int = PATCH
    in_channels: int = 16
    out_channels: int | None = None
    dim: int = field(default=2304, metadata=_OURS)
    n_layers: int = field(default=26, metadata=_OURS | {"max": 1000})
    n_refiner_layers: int = field(default=2, metadata=_OURS | {"max": 1000})
    n_heads: int = field(default=24, metadata=_OURS | {"max": 1024})
    n_kv_heads: int = field(default=8, metadata=_OURS | {"max": 1024})
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = field(default=None, metadata={"min": 0.01, "max": 100})
    norm_eps: float = 1e-5
    cap_feat_dim: int = 2304
    axes_dims: tuple[int, ...] = field(default=(32, 32, 32), metadata=_OURS)
    axes_lens: tuple[int, ...] = (300, 512, 512)

    def __post_init__(self) -> None:
        if self.patch_size != PATCH or self.out_channels not in (None, self.in_channels):
            raise ModelError(
                f"patch_size {self.patch_size} and channels {self.in_channels} in, {self.out_channels} out are not "
                f"supported; expected {PATCH} and as many out as in"
            )
        if self.dim % self.n_heads or len(self.axes_dims) != 3 or sum(self.axes_dims) != self.head_dim:
            raise ModelError(
                f"axes_dim_rope {list(self.axes_dims)} must be three numbers that add up to the width of a head, "
                f"hidden_size {self.dim} / num_attention_heads {self.n_heads}"
            )
        if any(axis % 2 for axis in self.axes_dims) or len(self.axes_lens) != 3:
            axes = f"axes_dim_rope {list(self.axes_dims)} must be even, axes_lens {list(self.axes_lens)}"
            raise ModelError(f"{axes} three")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"num_attention_heads {self.n_heads} is not a multiple of num_kv_heads {self.n_kv_heads}")

    @property
    def kv_dim(self) -> int:
        """The width of keys and of values, whose heads queries share."""
        return self.n_kv_heads * self.head_dim

    @property
    def time_dim(self) -> int:
        """The channels that modulation is made from."""
        return min(self.dim, TIME_WIDTH)

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        width = 4 * self.dim if self.ffn_dim_multiplier is None else int(self.ffn_dim_multiplier * 4 * self.dim)
        return -(-width // self.multiple_of) * self.multiple_of

    @property
    def features(self) -> int:
        """The channels of a token's patch."""
        return PATCH**2 * self.in_channels


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    return {_FIELDS.get(key, key): value for key, value in data.items()}


def manifest(config: LuminaConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in Z-Image's style (see `rename`)."""
    dim, modulated = config.dim, zimage_dit.modulated_block(config)
    plain = {key: shape for key, shape in modulated.items() if not key.startswith("adaLN_modulation.")}
    return params.merge(
        vector_embedding("t_embedder", config.time_dim, TIME_CHANNELS),
        params.linear("x_embedder", dim, config.features),
        params.norm("cap_embedder.0", config.cap_feat_dim),
        params.linear("cap_embedder.1", dim, config.cap_feat_dim),
        params.repeat("noise_refiner", config.n_refiner_layers, modulated),
        params.repeat("context_refiner", config.n_refiner_layers, plain),
        params.repeat("layers", config.n_layers, modulated),
        params.linear("final_layer.adaLN_modulation.1", dim, config.time_dim),
        params.linear("final_layer.linear", config.features, dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of diffusers' key."""
    key = with_parts(with_start(key, flipped(_STARTS)), flipped(_PARTS))
    return key.replace(".norm1.weight", ".attention_norm1.weight")  # of blocks without modulation


def published(name: str) -> str:
    """Return diffusers' name of a name of the manifest."""
    if name.startswith("context_refiner."):
        name = name.replace(".attention_norm1.", ".norm1.")
    return with_parts(with_start(name, _STARTS), _PARTS)


NETWORK = Network(
    name="lumina_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=LuminaConfig,
    manifest=manifest,
    fields=_fields,
    ignored=frozenset({"sample_size", "scaling_factor"}),
    blocks=re.compile(r"layers\.(\d+)\.(?:attention|feed_forward)\..*\.weight"),
    streamable=re.compile(r"((?:noise_refiner|layers)\.\d+)\."),
    compiled=re.compile(r"(?:noise_refiner|layers)\.\d+"),
    # of the layers that image and text share
    cached_blocks=lambda config: CachedBlocks.but_first("layers", config.n_layers),
    traced=(
        Block(name="block", paths=re.compile(r"(?:noise_refiner|context_refiner|layers)\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile("t_embedder")),
        Block(name="start", paths=re.compile("x_embedder|cap_embedder\\.[01]")),
        Block(name="head", paths=re.compile("final_layer")),
        Block(name="model", paths=re.compile(""), image=True),
    ),
    rename=rename,
    published=published,
    described=lambda config: {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
    architectures=frozenset({"lumina2"}),
)
