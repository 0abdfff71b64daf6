"""Krea 2's transformer: configuration and manifest.

What is unusual about it:
- a text-fusion tower makes the text of the states behind several layers of the text encoder: two blocks attend across
  the layers of one token, a product sums the layers up, two blocks attend across the tokens; none has RoPE;
- one stream, text tokens before image tokens; text has no pads, and stands at 0 on all axes of RoPE;
- attention has fewer heads of keys and values than of queries, and its result goes through a gate, a sigmoid of a layer
  of the same input;
- one modulation for all blocks, in the order scale, shift, gate; each block adds a table of its own, and the head adds
  its table to the time's embedding itself;
- all norms are RMSNorms whose gain is stored minus one; GELU by tanh stands for SiLU at the time;
- RoPE turns adjacent pairs by (0, row, column); a patch has the order (c, dy, dx).

Source: the reference class of diffusers, whose defaults are the published sizes of Krea 2 Raw and Turbo, which differ
in their weights alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.block import Block, CachedBlocks
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.denoisers.diffusion_transformer import vector_embedding
from qwenimg.common.networks.layout import flipped, with_parts, with_start
from qwenimg.common.networks.network import Network

CLASS_NAME = "Krea2Transformer2DModel"

TABLE = "scale_shift_table"
MOST_BLOCKS = 1000
_MFLUX = {
    **{f"{ours}.linear_in.": f"{theirs}." for ours, theirs in (("tmlp", "tmlp.0"), ("txtmlp", "txtmlp.1"))},
    **{f"{ours}.linear_out.": f"{theirs}." for ours, theirs in (("tmlp", "tmlp.2"), ("txtmlp", "txtmlp.3"))},
    "tproj.linear.": "tproj.1.",
    "txtmlp.norm.": "txtmlp.0.",
}
"""Starts of names that only mflux has, by those of the authors."""
STARTS = {
    "img_in.": "first.",
    "time_embed.linear_1.": "tmlp.0.",
    "time_embed.linear_2.": "tmlp.2.",
    "time_mod_proj.": "tproj.1.",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.norm.": "txtmlp.0.",
    "txt_in.linear_1.": "txtmlp.1.",
    "txt_in.linear_2.": "txtmlp.3.",
    "text_fusion.": "txtfusion.",
    "transformer_blocks.": "blocks.",
    f"final_layer.{TABLE}.weight": "last.modulation.lin",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.": "last.",
}
"""The authors' starts of names, by those of diffusers."""
PARTS = {
    ".attn.to_q.": ".attn.wq.",
    ".attn.to_k.": ".attn.wk.",
    ".attn.to_v.": ".attn.wv.",
    ".attn.to_out.0.": ".attn.wo.",
    ".attn.to_gate.": ".attn.gate.",
    ".attn.norm_q.weight": ".attn.qknorm.qnorm.scale",
    ".attn.norm_k.weight": ".attn.qknorm.knorm.scale",
    ".ff.": ".mlp.",
    ".norm1.weight": ".prenorm.scale",
    ".norm2.weight": ".postnorm.scale",
    f".{TABLE}.weight": ".mod.lin",
}
"""The authors' parts of names within a block, by those of diffusers."""


@dataclass(frozen=True, kw_only=True)
class Krea2Config:
    """The fields of `transformer/config.json`; the defaults are the published 12.8 B models'."""

    in_channels: int = 64
    num_layers: int = field(default=28, metadata={"max": MOST_BLOCKS})
    attention_head_dim: int = field(default=128, metadata={"max": 1024})
    num_attention_heads: int = field(default=48, metadata={"max": 1024})
    num_key_value_heads: int = field(default=12, metadata={"max": 1024})
    intermediate_size: int = 16384
    timestep_embed_dim: int = field(default=256, metadata={"max": 2**16})
    text_hidden_dim: int = 2560
    num_text_layers: int = field(default=12, metadata={"max": 1000})
    text_num_attention_heads: int = field(default=20, metadata={"max": 1024})
    text_num_key_value_heads: int = field(default=20, metadata={"max": 1024})
    text_intermediate_size: int = 6912
    num_layerwise_text_blocks: int = field(default=2, metadata={"max": 100})
    num_refiner_text_blocks: int = field(default=2, metadata={"max": 100})
    axes_dims_rope: tuple[int, ...] = (32, 48, 48)
    rope_theta: float = 1000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        axes = self.axes_dims_rope
        if len(axes) != 3 or sum(axes) != self.attention_head_dim or any(axis % 2 for axis in axes):
            raise ModelError(
                f"axes_dims_rope {list(axes)} must be three even numbers that add up to attention_head_dim "
                f"{self.attention_head_dim}"
            )
        for start in ("", "text_"):
            heads, keys = (getattr(self, f"{start}num_{kind}_heads") for kind in ("attention", "key_value"))
            if heads % keys:
                raise ModelError(f"{start}num_attention_heads {heads} must be a multiple of {keys} key and value heads")
        if self.text_hidden_dim % self.text_num_attention_heads:
            raise ModelError(
                f"text_hidden_dim {self.text_hidden_dim} must be a multiple of text_num_attention_heads "
                f"{self.text_num_attention_heads}"
            )
        if self.in_channels % 4 or self.timestep_embed_dim % 2:
            raise ModelError(
                f"in_channels {self.in_channels} must be a multiple of 4, timestep_embed_dim "
                f"{self.timestep_embed_dim} even"
            )
        if not self.norm_eps > 0 or not self.rope_theta > 1:
            raise ModelError(f"norm_eps {self.norm_eps} or rope_theta {self.rope_theta} is out of range")

    @property
    def dim(self) -> int:
        """The width of the stream."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def states(self) -> int:
        """The channels of a token's text states."""
        return self.num_text_layers * self.text_hidden_dim


def manifest(config: Krea2Config) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout; a table is a `weight`."""
    dim, text = config.dim, config.text_hidden_dim
    heads = (config.attention_head_dim, config.num_key_value_heads)
    text_heads = (text // config.text_num_attention_heads, config.text_num_key_value_heads)
    fusion = _block(text, *text_heads, config.text_intermediate_size)
    block = _block(dim, *heads, config.intermediate_size)
    return params.merge(
        params.linear("img_in", dim, config.in_channels),
        vector_embedding("time_embed", dim, config.timestep_embed_dim),
        params.linear("time_mod_proj", 6 * dim, dim),
        params.repeat("text_fusion.layerwise_blocks", config.num_layerwise_text_blocks, fusion),
        params.linear("text_fusion.projector", 1, config.num_text_layers, bias=False),
        params.repeat("text_fusion.refiner_blocks", config.num_refiner_text_blocks, fusion),
        params.norm("txt_in.norm", text),
        vector_embedding("txt_in", dim, text),
        params.repeat("transformer_blocks", config.num_layers, {f"{TABLE}.weight": (6, dim)} | block),
        {f"final_layer.{TABLE}.weight": (2, dim)},
        params.norm("final_layer.norm", dim),
        params.linear("final_layer.linear", config.in_channels, dim),
    )


def _block(width: int, head_dim: int, key_heads: int, hidden: int) -> Manifest:
    keys = head_dim * key_heads
    sizes = {"to_q": (width, width), "to_k": (keys, width), "to_v": (keys, width), "to_gate": (width, width)}
    sizes["to_out.0"] = (width, width)
    return params.merge(
        *(params.norm(name, width) for name in ("norm1", "norm2")),
        *(params.linear(f"attn.{name}", *size, bias=False) for name, size in sizes.items()),
        *(params.norm(f"attn.{name}", head_dim) for name in ("norm_q", "norm_k")),
        *(params.linear(f"ff.{name}", hidden, width, bias=False) for name in ("gate", "up")),
        params.linear("ff.down", width, hidden, bias=False),
    )


def authors_name(name: str) -> str:
    """Return the authors' name of a parameter."""
    return with_parts(with_start(name, STARTS), PARTS)


def rename(key: str) -> str:
    """Return the manifest key of a file's key, in diffusers' names, the authors' or mflux's."""
    key = with_parts(with_start(with_start(key, _MFLUX), flipped(STARTS)), flipped(PARTS))
    return f"{key}.weight" if key.endswith(f".{TABLE}") else key


def published(name: str) -> str:
    """Return the name in files of a name of the manifest."""
    return name.removesuffix(".weight") if name.endswith(f".{TABLE}.weight") else name


_FUSION = r"text_fusion\.(?:layerwise|refiner)_blocks\.\d+"

NETWORK = Network(
    name="krea2_dit",
    role="transformer",
    kind=CLASS_NAME,
    config=Krea2Config,
    manifest=manifest,
    blocks=re.compile(r"transformer_blocks\.(\d+)\.(?:attn|ff)\..*\.weight"),
    streamable=re.compile(r"(transformer_blocks\.\d+)\."),
    lora_prefix="diffusion_model.",
    compiled=re.compile(r"transformer_blocks\.\d+"),
    cached_blocks=lambda config: CachedBlocks.but_first("transformer_blocks", config.num_layers),
    tables=frozenset(
        {f"final_layer.{TABLE}.weight", *(f"transformer_blocks.{i}.{TABLE}.weight" for i in range(MOST_BLOCKS))}
    ),
    traced=(
        Block(name="block", paths=re.compile(r"transformer_blocks\.\d+"), streams=1, depth=1),
        Block(name="fusion_block", paths=re.compile(_FUSION), streams=1, depth=1),
        Block(name="fusion", paths=re.compile("text_fusion")),
        Block(name="time", paths=re.compile("time_embed|time_mod_proj")),
        Block(name="start", paths=re.compile("img_in|txt_in")),
        Block(name="head", paths=re.compile("final_layer")),
        Block(name="model", paths=re.compile("")),
    ),
    rename=rename,
    mflux_signs=(*_MFLUX,),
    published=published,
    architectures=frozenset({"krea2"}),
)
