"""Anima's transformer, which is Cosmos-Predict2's for single frames: configuration and manifest.

What is unusual about it:
- text is no part of the stream: each block attends to it, between the image's attention to itself and the feed-forward,
  and sees the zeros with which text is filled up, since nothing masks them;
- a block makes its shift, scale and gate by two narrow layers, as a LoRA would, and adds those that the time has for
  all blocks; they are made of the normed sinusoid of the time, and not of its embedding;
- the sinusoid is as wide as the stream, of a time in 0..1;
- a patch has a channel more than the latents, which marks padding of a video and is zero for an image;
- a patch has the order (c, dy, dx) on the way in and (dy, dx, c) on the way out;
- RoPE turns halves by (0, row, column), with a longer base for each axis of the image; no projection has a bias.

Source: the reference class of diffusers, and the configuration of Anima Base.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import attention, feed_forward, vector_embedding
from qwenimg.common.networks.encoders.anima_conditioner import INSIDE
from qwenimg.common.networks.layout import flipped, with_parts, with_start
from qwenimg.common.networks.network import Network

CLASS_NAME = "CosmosTransformer3DModel"

PATCH = 2  # latents a side of a token
NORM_EPS = 1e-6  # of the norms of the stream and of the time
HEAD_EPS = 1e-5  # of the norms of queries and keys
_SWITCHED_OFF = ("extra_pos_embed_type", "use_crossattn_projection", "img_context_dim_in")
STARTS = {
    "patch_embed.proj.": "x_embedder.proj.1.",
    "time_embed.t_embedder.": "t_embedder.1.",
    "time_embed.norm.": "t_embedding_norm.",
    "transformer_blocks.": "blocks.",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out.": "final_layer.linear.",
}
"""The authors' starts of names, by those of diffusers."""
PARTS = {
    ".norm1.linear_": ".adaln_modulation_self_attn.",
    ".norm2.linear_": ".adaln_modulation_cross_attn.",
    ".norm3.linear_": ".adaln_modulation_mlp.",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_q.": ".q_proj.",
    ".to_k.": ".k_proj.",
    ".to_v.": ".v_proj.",
    ".to_out.0.": ".output_proj.",
    ".norm_q.": ".q_norm.",
    ".norm_k.": ".k_norm.",
    ".ff.net.0.proj.": ".mlp.layer1.",
    ".ff.net.2.": ".mlp.layer2.",
}
"""The authors' parts of names within a block, by those of diffusers."""


@dataclass(frozen=True, kw_only=True)
class AnimaConfig:
    """The fields of `transformer/config.json`; the defaults are those of the published 2 B models."""

    in_channels: int = 16
    out_channels: int = 16
    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_layers: int = field(default=28, metadata={"max": 1000})
    mlp_ratio: float = field(default=4.0, metadata={"min": 0.01, "max": 100})
    text_embed_dim: int = 1024
    adaln_lora_dim: int = 256
    patch_size: tuple[int, ...] = (1, PATCH, PATCH)
    rope_scale: tuple[float, ...] = (1.0, 4.0, 4.0)
    concat_padding_mask: bool = True
    extra_pos_embed_type: str | None = None
    use_crossattn_projection: bool = False
    img_context_dim_in: int | None = None

    def __post_init__(self) -> None:
        if self.patch_size != (1, PATCH, PATCH) or self.in_channels != self.out_channels:
            raise ModelError(
                f"patch_size {list(self.patch_size)} and channels {self.in_channels} in, {self.out_channels} out are "
                f"not supported; expected [1, {PATCH}, {PATCH}] and as many out as in"
            )
        if self.attention_head_dim % 2 or self.attention_head_dim < 18:
            raise ModelError(f"attention_head_dim {self.attention_head_dim} must be an even number from 18 on")
        if len(self.rope_scale) != 3 or not all(0 < scale <= 1000 for scale in self.rope_scale):
            raise ModelError(f"rope_scale {list(self.rope_scale)} must be three numbers above 0, at most 1000")
        if not self.concat_padding_mask:
            raise ModelError("concat_padding_mask is false: patches without the channel of padding are not supported")
        for name in _SWITCHED_OFF:
            if getattr(self, name):
                raise ModelError(f"{name} is {getattr(self, name)!r}: only models without it are supported")

    @property
    def dim(self) -> int:
        """The width of the stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def hidden(self) -> int:
        """The width of the feed-forward; a ratio that a file's shapes show is rounded."""
        return int(self.dim * self.mlp_ratio + 1e-6)

    @property
    def axes(self) -> tuple[int, int, int]:
        """The channels of a head that RoPE turns by frame, row and column."""
        side = self.attention_head_dim // 6 * 2
        return self.attention_head_dim - 2 * side, side, side


def manifest(config: AnimaConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    dim, narrow, patch = config.dim, config.adaln_lora_dim, PATCH**2
    block = params.merge(
        *(vector_embedding(name, narrow, dim, 3 * dim, bias=False) for name in ("norm1", "norm2", "norm3")),
        attention("attn1", dim, config.attention_head_dim, bias=False),
        attention("attn2", dim, config.attention_head_dim, bias=False, seen=config.text_embed_dim),
        feed_forward("ff", dim, config.hidden, bias=False),
    )
    return params.merge(
        params.linear("patch_embed.proj", dim, patch * (config.in_channels + 1), bias=False),
        vector_embedding("time_embed.t_embedder", dim, dim, 3 * dim, bias=False),
        params.norm("time_embed.norm", dim),
        params.repeat("transformer_blocks", config.num_layers, block),
        vector_embedding("norm_out", narrow, dim, 2 * dim, bias=False),
        params.linear("proj_out", patch * config.out_channels, dim, bias=False),
    )


def authors_name(name: str) -> str:
    """Return the authors' name of a parameter."""
    return with_parts(with_start(name, STARTS), PARTS)


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key, in diffusers' names or its authors'; None for the text's network."""
    key = with_parts(with_start(key, flipped(STARTS)), flipped(PARTS))
    return None if key.startswith(INSIDE) else key


NETWORK = Network(
    name="anima_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=AnimaConfig,
    manifest=manifest,
    ignored=frozenset(
        {
            # of videos alone: positions past an image's, other pictures, control networks
            *("max_size", "controlnet_block_every_n", "img_context_num_tokens", "img_context_dim_out"),
            *("crossattn_proj_in_channels", "encoder_hidden_states_channels"),
        }
    ),
    blocks=re.compile(r"transformer_blocks\.\d+\.(?:attn\d|ff)\..*\.weight"),
    # keys and values of the text are made once, of all blocks
    streamable=re.compile(r"(transformer_blocks\.\d+)\.(?!attn2\.(?:to_[kv]|norm_k)\.)"),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=1, depth=1),
        Block(name="context", paths=re.compile(r"transformer_blocks\.\d+"), method="context"),
        Block(name="time", paths=re.compile("time_embed")),
        Block(name="start", paths=re.compile("patch_embed")),
        Block(name="head", paths=re.compile("norm_out|proj_out")),
        Block(name="model", paths=re.compile("")),
    ),
    rename=rename,
    mflux_signs=("blocks.0.adaln_modulation_self_attn.1.weight",),  # mflux has its authors' names
    architectures=frozenset({"cosmos"}),
)
