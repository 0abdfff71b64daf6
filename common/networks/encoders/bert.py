"""BERT's encoder, the first text encoder of Hunyuan-DiT, which calls it a CLIP: configuration, key styles and manifest.

What is unusual about it:
- norms come after each sum, and one after the embeddings, so that there is none at the end;
- a table has a row for each of two texts of a pair; prompts are the first, so row 0 is added to every token;
- attention is in both directions. Padding is masked, and no state of it is used: the encoder is given words alone;
- files may have names behind `bert.`, and a pooler and heads, which are not needed.

Source: J. Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding (2018); the
configuration of Chinese RoBERTa-wwm-ext-large, from which the published encoder was trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.block import Block
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.networks import params
from qwenimg.common.networks.encoders.clip import LayerSizes
from qwenimg.common.networks.network import Network

MODEL_TYPE = "bert"
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")

_NOT_NEEDED = ("pooler.", "cls.", "embeddings.position_ids")
_ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
# transformers' defaults, which a saved configuration may leave out
_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


@dataclass(frozen=True, kw_only=True)
class BertConfig(LayerSizes):
    """The fields of `text_encoder/config.json`. Defaults: Hunyuan-DiT's."""

    vocab_size: int = field(default=47020, metadata={"max": 2**20})
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = field(default=24, metadata={"max": 1000})
    num_attention_heads: int = field(default=16, metadata={"max": 1024})
    max_position_embeddings: int = field(default=512, metadata={"max": 2**16})
    type_vocab_size: int = field(default=2, metadata={"max": 1024})
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        self.check_layers(("gelu",))


def fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `BertConfig` from a config.json. Raises ModelError for another model."""
    for name, only in (("model_type", MODEL_TYPE), *_ONLY.items()):
        if data.get(name, only) != only:
            raise ModelError(f"{name} {clean(data[name], 60)!r} is not supported; expected {only!r}")
    return _DEFAULTS | {name: data[name] for name in BertConfig.__dataclass_fields__ if name in data}


def manifest(config: BertConfig) -> Manifest:
    """Return the shape of every tensor of the encoder, by its key in transformers' files."""
    width, inner = config.hidden_size, config.intermediate_size
    rows = (config.vocab_size, config.max_position_embeddings, config.type_vocab_size)
    layer = params.merge(
        *(params.linear(f"attention.self.{name}", width, width) for name in ("query", "key", "value")),
        params.linear("attention.output.dense", width, width),
        params.affine("attention.output.LayerNorm", width),
        params.linear("intermediate.dense", inner, width),
        params.linear("output.dense", width, inner),
        params.affine("output.LayerNorm", width),
    )
    return params.merge(
        {f"embeddings.{name}.weight": (count, width) for name, count in zip(EMBEDDINGS, rows, strict=True)},
        params.affine("embeddings.LayerNorm", width),
        params.repeat("encoder.layer", config.num_hidden_layers, layer),
    )


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key; None for a tensor of a head."""
    name = key.removeprefix("bert.")
    return None if name.startswith(_NOT_NEEDED) else name


NETWORK = Network(
    name="bert",
    role="text",
    kind=MODEL_TYPE,
    key="model_type",
    config=BertConfig,
    manifest=manifest,
    fields=fields,
    blocks=re.compile(r"encoder\.layer\.\d+\.(?:attention\.self\.\w+|(?:\w+\.)*dense)\.weight"),
    streamable=re.compile(r"(encoder\.layer\.\d+)\."),
    tables=frozenset(f"embeddings.{name}.weight" for name in EMBEDDINGS),
    rename=rename,
    traced=(
        Block(name="layer", paths=re.compile(r"encoder\.layer\.\d+"), streams=1, depth=1),
        Block(name="start", paths=re.compile("embeddings")),
        Block(name="model", paths=re.compile("")),
    ),
    architectures=frozenset({"bert"}),
    described=lambda config: {"architectures": ["BertModel"], "pad_token_id": 0},
)
