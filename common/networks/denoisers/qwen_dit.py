"""Qwen-Image's transformer (MMDiT): configuration and manifest.

What is unusual about it:
- two streams, image and text, with weights of their own, meet only in the joint attention (text first, then image);
- a third of all parameters (`img_mod`, `txt_mod`) depend on the timestep alone;
- blocks order their modulation (shift, scale, gate), the final norm orders it (scale, shift);
- RoPE turns adjacent pairs and counts image rows and columns from the centre;
- q and k go through RMSNorm; the feed-forward is GELU (tanh) with four times the width.

Source: the published configs of Qwen-Image, -2512, -Edit, -Edit-2509, -Edit-2511 (`zero_cond_t`) and -Layered
(`use_additional_t_cond`, `use_layer3d_rope`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers import diffusion_transformer
from qwenimg.common.networks.layout import with_parts
from qwenimg.common.networks.network import Network
from qwenimg.common.precision.residency import ALWAYS, ONCE
from qwenimg.common.weights.plan import ParamUse, ParamUses

CLASS_NAME = "QwenImageTransformer2DModel"
IGNORED_CONFIG = frozenset({"pooled_projection_dim"})  # left over in published configs from an older class

TIME_CHANNELS = 256
MLP_RATIO = 4
NORM_EPS = 1e-6
ROPE_THETA = 10000.0
ADDITION = "time_text_embed.addition_t_embedding.weight"
"""The table of the additional embedding, which only a model with `use_additional_t_cond` has."""
_MFLUX = {
    ".attn.attn_to_out.0.": ".attn.to_out.0.",
    "_mod_linear.": "_mod.1.",
    "_ff.mlp_in.": "_mlp.net.0.proj.",
    "_ff.mlp_out.": "_mlp.net.2.",
}


@dataclass(frozen=True, kw_only=True)
class QwenDiTConfig:
    """The fields of `transformer/config.json`; the defaults are the published 20 B model's."""

    patch_size: int = field(default=2, metadata={"max": 16})
    in_channels: int = 64
    out_channels: int | None = 16
    num_layers: int = field(default=60, metadata={"max": 1000})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=24, metadata={"max": 1024})
    joint_attention_dim: int = 3584
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False

    def __post_init__(self) -> None:
        if len(self.axes_dims_rope) != 3 or sum(self.axes_dims_rope) != self.attention_head_dim:
            raise ModelError(
                f"axes_dims_rope {list(self.axes_dims_rope)} must be three numbers that add up to "
                f"attention_head_dim {self.attention_head_dim}"
            )
        if any(axis % 2 for axis in self.axes_dims_rope):
            raise ModelError(f"axes_dims_rope {list(self.axes_dims_rope)} must be even numbers")
        if self.guidance_embeds:
            raise ModelError("guidance_embeds is true: guidance-distilled Qwen-Image models are not supported")

    @property
    def dim(self) -> int:
        """The width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def out_features(self) -> int:
        """The channels of one predicted token."""
        return self.patch_size**2 * (self.out_channels or self.in_channels)


def manifest(config: QwenDiTConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim = config.dim
    return params.merge(
        trunk(config),
        params.linear("norm_out.linear", 2 * dim, dim),
        params.linear("proj_out", config.out_features, dim),
    )


def trunk(config: QwenDiTConfig) -> Manifest:
    """Return the shapes of all but the head, which a ControlNet has too."""
    dim = config.dim
    addition = {ADDITION: (2, dim)}
    return params.merge(
        diffusion_transformer.vector_embedding("time_text_embed.timestep_embedder", dim, TIME_CHANNELS),
        addition if config.use_additional_t_cond else {},
        params.norm("txt_norm", config.joint_attention_dim),
        params.linear("img_in", dim, config.in_channels),
        params.linear("txt_in", dim, config.joint_attention_dim),
        params.repeat("transformer_blocks", config.num_layers, _block(dim, config.attention_head_dim)),
    )


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names or mflux's."""
    return with_parts(key, _MFLUX)


def uses(stored: Manifest) -> ParamUses:
    """Return all of `stored`, in its shapes. Tensors for the timestep alone are in memory once per schedule."""
    return {key: ParamUse(shape, residency=ONCE if timestep_only(key) else ALWAYS) for key, shape in stored.items()}


def timestep_only(key: str) -> bool:
    """Return whether `key` depends on the timestep alone, so that it is evaluated once per schedule and freed."""
    return "_mod.1." in key or key.startswith(("time_text_embed.", "norm_out.linear."))


def _block(dim: int, head_dim: int) -> Manifest:
    return params.merge(
        params.linear("img_mod.1", 6 * dim, dim),
        params.linear("txt_mod.1", 6 * dim, dim),
        diffusion_transformer.joint_attention("attn", dim, head_dim),
        diffusion_transformer.feed_forward("img_mlp", dim, MLP_RATIO * dim),
        diffusion_transformer.feed_forward("txt_mlp", dim, MLP_RATIO * dim),
    )


NETWORK = Network(
    name="qwen_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=QwenDiTConfig,
    manifest=manifest,
    used=lambda config, stored: uses(stored),
    ignored=IGNORED_CONFIG,
    rename=rename,
    mflux_signs=(
        "transformer_blocks.0.img_mod_linear.",
        "transformer_blocks.0.attn.attn_to_out.",
        "transformer_blocks.0.img_ff.",
    ),
    blocks=re.compile(r"transformer_blocks\.(\d+)\..*\.weight"),
    streamable=re.compile(r"(transformer_blocks\.\d+)\."),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    tables=frozenset({ADDITION}),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=2, depth=1),
        Block(name="modulation", paths=re.compile(r"transformer_blocks\.\d+"), method="modulation", once=True),
        Block(name="time", paths=re.compile("time_text_embed"), once=True),
        Block(name="start", paths=re.compile("img_in|txt_norm|txt_in")),
        Block(name="head_modulation", paths=re.compile("norm_out"), method="modulation", once=True),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"qwen_image"}),
)
