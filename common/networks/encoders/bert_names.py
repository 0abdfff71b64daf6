"""BERT's encoder in files: transformers' names, which its `rename` maps."""

from __future__ import annotations

from typing import Any

from qwenimg.common.networks.encoders import bert
from qwenimg.common.networks.encoders.bert import EMBEDDINGS, BertConfig
from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes

_NORM = "encoder.layer.0.output.LayerNorm.weight"
_QUERY = "encoder.layer.0.attention.self.query.weight"
HEAD_DIM = 64


def _config(stored: StoredShapes, like: BertConfig) -> BertConfig:
    """Return the configuration for stored shapes. One of another width than `like` has heads of HEAD_DIM."""
    [width] = stored.shape(_NORM, 1)
    rows = (stored.shape(f"embeddings.{name}.weight", 2)[0] for name in EMBEDDINGS)
    names = ("vocab_size", "max_position_embeddings", "type_vocab_size")
    data: dict[str, Any] = dict(zip(names, rows, strict=True))
    data |= {
        "hidden_size": width,
        "intermediate_size": stored.shape("encoder.layer.0.intermediate.dense.bias", 1)[0],
        "num_hidden_layers": len(stored.blocks(_NORM)),
        "num_attention_heads": like.num_attention_heads if width == like.hidden_size else max(1, width // HEAD_DIM),
    }
    return stored.config(like, **data)


LAYOUTS = Layouts(
    network=bert.NETWORK,
    title="BERT",
    rows=(
        Layout(names="transformers' names", signs=(_QUERY,)),
        Layout(names="transformers' names of a model with heads", signs=(f"bert.{_QUERY}",)),
    ),
    config=_config,
)
