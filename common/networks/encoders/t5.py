"""T5's encoder (version 1.1, and mT5's), a text encoder of Flux.1, Stable Diffusion 3 and others, and UMT5's,
AuraFlow's: configuration, key styles and manifest.

What is unusual about it:
- embeddings are not multiplied by the root of their width, and scores are not divided by the root of a head's width;
- it has no positions: a bias for each head and each bucket of distances is added to the scores. Its table is stored in
  the first block, and all blocks use the one bias that is made from it; of UMT5 each block has a table of its own;
- all heads together are `num_heads` times `d_kv` wide, which need not be the width of the stream; no layer has a bias;
- the feed-forward is gated by GELU in its tanh approximation. The product of gate and values exceeds float16, and so
  does the residual stream after it: in float16 both are float32, with the layer between them (`policy`);
- padding is not masked: the padded positions attend, and are part of the conditioning; UMT5's pads are not seen;
- files may hold the table of tokens a second time, and the decoder, which is not needed. In GGUF the names are
  llama.cpp's.

Source: C. Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020); the
published configurations of T5 v1.1 and of AuraFlow's UMT5 (Pile-T5 XL).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.precision.precision import Precision

MODEL_TYPE, MULTILINGUAL, PILE_TYPE = "t5", "mt5", "umt5"
FEED_FORWARD = "gated-gelu"

_TOKENS, _TOKENS_AGAIN = "shared.weight", "encoder.embed_tokens.weight"
_TABLE = "layer.0.SelfAttention.relative_attention_bias.weight"  # of distances, in a block
_BUCKETS = f"encoder.block.0.{_TABLE}"
SECOND_BUCKETS = f"encoder.block.1.{_TABLE}"
"""A tensor that UMT5 has and T5 has not."""
_BEYOND_FLOAT16 = re.compile(r"encoder\.block\.\d+\.layer\.1\.DenseReluDense\.wo")
_NOT_NEEDED = ("decoder.", "lm_head.", "dec.", "output.")
# transformers' defaults, which a saved configuration may leave out
_DEFAULTS = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "feed_forward_proj": "relu",
}
_MULTILINGUAL_DEFAULTS = {
    "vocab_size": 250112,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": FEED_FORWARD,
}
_LLAMA_CPP = {
    "attn_norm": "layer.0.layer_norm",
    "attn_q": "layer.0.SelfAttention.q",
    "attn_k": "layer.0.SelfAttention.k",
    "attn_v": "layer.0.SelfAttention.v",
    "attn_o": "layer.0.SelfAttention.o",
    "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
    "ffn_norm": "layer.1.layer_norm",
    "ffn_gate": "layer.1.DenseReluDense.wi_0",
    "ffn_up": "layer.1.DenseReluDense.wi_1",
    "ffn_down": "layer.1.DenseReluDense.wo",
}
_LLAMA_CPP_ENDS = {"token_embd.weight": _TOKENS, "enc.output_norm.weight": "encoder.final_layer_norm.weight"}
# mflux has the table of distances in every block; the first one's is used
_MFLUX_BLOCK = re.compile(r"t5_blocks\.(?P<block>\d+)\.(?P<part>attention|ff)\.(?P<rest>.+)")
_MFLUX_PARTS = {"attention": "layer.0", "ff": "layer.1"}
_LLAMA_CPP_BLOCK = re.compile(r"enc\.blk\.(?P<block>\d+)\.(?P<part>[a-z_]+)\.weight")


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """The fields of `config.json` that the encoder needs. Defaults: T5-XXL."""

    vocab_size: int = field(default=32128, metadata={"max": 2**20})
    d_model: int = 4096
    d_kv: int = field(default=64, metadata={"max": 1024})
    d_ff: int = 10240
    num_layers: int = field(default=24, metadata={"max": 1000})
    num_heads: int = field(default=64, metadata={"max": 1024})
    relative_attention_num_buckets: int = field(default=32, metadata={"min": 4, "max": 1024})
    relative_attention_max_distance: int = field(default=128, metadata={"min": 2})
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = FEED_FORWARD
    shares_bias: bool = field(
        default=True, metadata={"in_files": False}
    )  # whether all blocks use the first one's table

    def __post_init__(self) -> None:
        if self.feed_forward_proj != FEED_FORWARD:
            raise ModelError(
                f"feed_forward_proj {clean(self.feed_forward_proj, 40)!r} is not supported; expected {FEED_FORWARD!r}, "
                "that of T5 v1.1"
            )
        if self.relative_attention_num_buckets % 4:
            raise ModelError(
                f"relative_attention_num_buckets {self.relative_attention_num_buckets} is not a multiple of 4"
            )
        if self.relative_attention_max_distance <= self.near:
            raise ModelError(
                f"relative_attention_max_distance {self.relative_attention_max_distance} must be more than "
                f"{self.near}, a quarter of relative_attention_num_buckets"
            )
        if not self.layer_norm_epsilon > 0:
            raise ModelError(f"layer_norm_epsilon {self.layer_norm_epsilon} is out of range")

    @property
    def near(self) -> int:
        """The number of distances in each direction, 0 among them, that have a bucket of their own."""
        return self.relative_attention_num_buckets // 4

    @property
    def inner_dim(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.d_kv

    # By the names that all text encoders have
    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def intermediate_size(self) -> int:
        return self.d_ff

    @property
    def num_attention_heads(self) -> int:
        return self.num_heads


def fields(data: Mapping[str, Any], kinds: tuple[str, ...] = (MODEL_TYPE, MULTILINGUAL)) -> dict[str, Any]:
    """Return the fields of `T5Config` from a config.json of one of `kinds`, of the first if it names none. Raises
    ModelError for another model."""
    kind = data.get("model_type", kinds[0])
    if kind not in kinds:
        raise ModelError(f"model_type {clean(kind, 60)!r} is not supported; expected {kinds[0]!r}")
    defaults = _DEFAULTS if kind == MODEL_TYPE else _MULTILINGUAL_DEFAULTS
    return defaults | {name: data[name] for name in T5Config.__dataclass_fields__ if name in data}


def manifest(config: T5Config) -> Manifest:
    """Return the shape of every tensor of the encoder, by its key in transformers' files."""
    width, inner = config.d_model, config.inner_dim
    block = params.merge(
        *(params.linear(f"layer.0.SelfAttention.{name}", inner, width, bias=False) for name in ("q", "k", "v")),
        params.linear("layer.0.SelfAttention.o", width, inner, bias=False),
        params.norm("layer.0.layer_norm", width),
        *(params.linear(f"layer.1.DenseReluDense.{name}", config.d_ff, width, bias=False) for name in ("wi_0", "wi_1")),
        params.linear("layer.1.DenseReluDense.wo", width, config.d_ff, bias=False),
        params.norm("layer.1.layer_norm", width),
    )
    table = {_TABLE: (config.relative_attention_num_buckets, config.num_heads)}
    return params.merge(
        {_TOKENS: (config.vocab_size, width)},
        params.repeat("encoder.block", config.num_layers, block),
        params.repeat("encoder.block", 1 if config.shares_bias else config.num_layers, table),
        params.norm("encoder.final_layer_norm", width),
    )


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key in any known style; None for a tensor of the decoder."""
    if key.startswith(_NOT_NEEDED):
        return None
    match = _LLAMA_CPP_BLOCK.fullmatch(key)
    if match and match["part"] in _LLAMA_CPP:
        return f"encoder.block.{match['block']}.{_LLAMA_CPP[match['part']]}.weight"
    if match := _MFLUX_BLOCK.fullmatch(key):
        block, part, rest = match.groups()
        again = rest.startswith("SelfAttention.relative_attention_bias.") and block != "0"
        return None if again else f"encoder.block.{block}.{_MFLUX_PARTS[part]}.{rest}"
    if key.startswith("final_layer_norm."):
        return f"encoder.{key}"
    return _LLAMA_CPP_ENDS.get(key, _TOKENS if key == _TOKENS_AGAIN else key)


def policy(precision: Precision) -> Precision:
    """Return `precision` with the layers and the stream in float32 whose values float16 does not hold."""
    return replace(precision, wide=_BEYOND_FLOAT16)


def buckets(config: T5Config, length: int) -> NDArray[np.int64]:
    """Return the bucket of each query's distance to each key, [length length].

    Half of the buckets are for keys after the query. Of each half, the first half are for one distance each, and the
    others for ranges between them and `relative_attention_max_distance` that grow by one factor."""
    each = np.array([_bucket(config, distance) for distance in range(length)], np.int64)
    distances = np.arange(length)[None, :] - np.arange(length)[:, None]
    behind = np.where(distances > 0, config.relative_attention_num_buckets // 2, 0)
    rows: NDArray[np.int64] = each[np.abs(distances)] + behind
    return rows


def _bucket(config: T5Config, distance: int) -> int:
    """Return the bucket of a distance without its sign. Range k begins at near (most / near)^(k / near), in integers:
    logarithms would round at the edges."""
    near, most = config.near, config.relative_attention_max_distance
    if distance < near:
        return distance
    return near + len([k for k in range(1, near) if distance**near * near**k >= most**k * near**near])


NETWORK = Network(
    name="t5",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=T5Config,
    manifest=manifest,
    fields=fields,
    blocks=re.compile(
        r"encoder\.block\.\d+\.layer\.\d\.(?:SelfAttention|DenseReluDense)\.(?:[qkvo]|w[io](?:_\d)?)\.weight"
    ),
    streamable=re.compile(r"(encoder\.block\.\d+)\.(?!layer\.0\.SelfAttention\.relative_attention_bias\.)"),
    tables=frozenset({_TOKENS, _BUCKETS}),
    rename=rename,
    copies=frozenset({_TOKENS_AGAIN}),
    traced=(
        Block(name="layer", paths=re.compile(r"encoder\.block\.\d+"), streams=1, depth=1),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"t5", "t5encoder"}),
    described=lambda config: {"architectures": ["T5EncoderModel"]},
)
UMT5 = replace(
    NETWORK,
    kind=PILE_TYPE,
    fields=lambda data: fields(data, (PILE_TYPE,)),
    stated={"shares_bias": False},
    described=lambda config: {"architectures": ["UMT5EncoderModel"]},
)
"""The encoder whose blocks have tables of their own."""
