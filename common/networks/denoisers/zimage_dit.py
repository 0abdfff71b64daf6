"""Z-Image's transformer (S3-DiT): configuration and manifest.

What is unusual about it:
- one stream: image tokens, then text tokens, after two refiner blocks for each alone;
- image and text are each padded to a multiple of 32 with a learned token, and pads attend like all others;
- its time input is 1 - sigma, and its output is the negative velocity;
- blocks have two scales and two gates through a tanh, and no shift; each update goes through an RMSNorm of its own;
- modulation comes from 256 channels: without SiLU before it in the blocks, with one in the final layer;
- the channels of a patch come last, in the order (dy, dx, c);
- RoPE turns adjacent pairs by (frame, row, column); text counts along the frames, and the image comes after it.

Source: the published configurations of Z-Image and Z-Image-Turbo.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention
from qwenimg.common.networks.layout import flipped, with_start
from qwenimg.common.networks.network import Network

CLASS_NAME = "ZImageTransformer2DModel"

TIME_CHANNELS = 256  # of the sinusoid, and at most so many of its embedding
TIME_WIDTH = 1024
PATCH = 2
QK_EPS = 1e-5
FINAL_EPS = 1e-6
# In the files a layer's name has the sizes of its patches; pad tokens are tables of one row here.
_STORED = {
    "x_embedder.": f"all_x_embedder.{PATCH}-1.",
    "final_layer.": f"all_final_layer.{PATCH}-1.",
    "x_pad_token.weight": "x_pad_token",
    "cap_pad_token.weight": "cap_pad_token",
}
# Starts of the names that only mflux has
_MFLUX = {
    "t_embedder.linear1.": "t_embedder.mlp.0.",
    "t_embedder.linear2.": "t_embedder.mlp.2.",
    f"all_final_layer.{PATCH}-1.adaLN_modulation.0.": "final_layer.adaLN_modulation.1.",
}
_OURS = _MFLUX | flipped(_STORED)


class BlockSizes:
    """The sizes of a block, in the transformer and in its control networks."""

    dim: int
    n_heads: int
    norm_eps: float

    @property
    def num_attention_heads(self) -> int:
        """The number of heads, by the name that all transformers have."""
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def kv_dim(self) -> int:
        """The width of keys and of values."""
        return self.dim

    @property
    def time_dim(self) -> int:
        """The channels that modulation is made from."""
        return min(self.dim, TIME_CHANNELS)

    @property
    def hidden(self) -> int:
        """The width of the feed-forward."""
        return int(self.dim / 3 * 8)


@dataclass(frozen=True, kw_only=True)
class ZImageConfig(BlockSizes):
    """The fields of `transformer/config.json`; the defaults are the published 6 B model's."""

    all_patch_size: tuple[int, ...] = (PATCH,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: int = 16
    dim: int = 3840
    n_layers: int = field(default=30, metadata={"max": 1000})
    n_refiner_layers: int = field(default=2, metadata={"max": 1000})
    n_heads: int = field(default=30, metadata={"max": 1024})
    n_kv_heads: int = 30  # not read by the class that made the files
    norm_eps: float = 1e-5
    qk_norm: bool = True
    cap_feat_dim: int = 2560
    siglip_feat_dim: int | None = None
    rope_theta: float = 256.0
    t_scale: float = 1000.0
    axes_dims: tuple[int, ...] = (32, 48, 48)
    axes_lens: tuple[int, ...] = (1024, 512, 512)

    def __post_init__(self) -> None:
        if self.siglip_feat_dim is not None:
            raise ModelError("siglip_feat_dim is given: models that edit images are not supported")
        expected = {"all_patch_size": (PATCH,), "all_f_patch_size": (1,), "qk_norm": True, "t_scale": 1000.0}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ModelError(f"{name} is {getattr(self, name)}: not supported; expected {value}")
        if self.dim % self.n_heads or len(self.axes_dims) != 3 or sum(self.axes_dims) != self.head_dim:
            raise ModelError(
                f"axes_dims {list(self.axes_dims)} must be three numbers that add up to the width of a head, "
                f"dim {self.dim} / n_heads {self.n_heads}"
            )
        if any(axis % 2 for axis in self.axes_dims) or len(self.axes_lens) != 3:
            raise ModelError(f"axes_dims {list(self.axes_dims)} must be even, axes_lens {list(self.axes_lens)} three")

    @property
    def features(self) -> int:
        """The channels of a token's patch."""
        return PATCH**2 * self.in_channels


def manifest(config: ZImageConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in a shorter form (see `rename`)."""
    dim, block, modulated = config.dim, _block(config), modulated_block(config)
    return params.merge(
        params.linear("t_embedder.mlp.0", TIME_WIDTH, TIME_CHANNELS),
        params.linear("t_embedder.mlp.2", config.time_dim, TIME_WIDTH),
        params.linear("x_embedder", dim, config.features),
        params.norm("cap_embedder.0", config.cap_feat_dim),
        params.linear("cap_embedder.1", dim, config.cap_feat_dim),
        {"x_pad_token.weight": (1, dim), "cap_pad_token.weight": (1, dim)},
        params.repeat("noise_refiner", config.n_refiner_layers, modulated),
        params.repeat("context_refiner", config.n_refiner_layers, block),
        params.repeat("layers", config.n_layers, modulated),
        params.linear("final_layer.adaLN_modulation.1", dim, config.time_dim),
        params.linear("final_layer.linear", config.features, dim),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    return with_start(key, _OURS)


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return with_start(name, _STORED)


def modulated_block(config: BlockSizes) -> Manifest:
    """Return the shape of every tensor of a block with modulation."""
    return _block(config) | params.linear("adaLN_modulation.0", 4 * config.dim, config.time_dim)


def _block(config: BlockSizes) -> Manifest:
    dim = config.dim
    return params.merge(
        attention("attention", dim, config.head_dim, bias=False, kv_dim=config.kv_dim),
        *(params.linear(f"feed_forward.{name}", config.hidden, dim, bias=False) for name in ("w1", "w3")),
        params.linear("feed_forward.w2", dim, config.hidden, bias=False),
        *(params.norm(name, dim) for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")),
    )


NETWORK = Network(
    name="zimage_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=ZImageConfig,
    manifest=manifest,
    blocks=re.compile(r"layers\.(\d+)\.(?:attention|feed_forward)\..*\.weight"),
    streamable=re.compile(r"((?:noise_refiner|layers)\.\d+)\."),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"(?:noise_refiner|layers)\.\d+"),
    # of the layers that image and text share
    cached_blocks=lambda config: CachedBlocks.but_first("layers", config.n_layers),
    tables=frozenset({"x_pad_token.weight", "cap_pad_token.weight"}),
    traced=(
        Block(name="block", paths=re.compile(r"(?:noise_refiner|context_refiner|layers)\.\d+"), streams=1, depth=1),
        Block(name="time", paths=re.compile("t_embedder")),
        Block(name="start", paths=re.compile("x_embedder|cap_embedder\\.[01]")),
        Block(name="head", paths=re.compile("final_layer")),
        Block(name="model", paths=re.compile("")),
    ),
    rename=rename,
    mflux_signs=(*_MFLUX,),
    published=published,
    architectures=frozenset({"lumina2"}),  # whose layers it has
)
