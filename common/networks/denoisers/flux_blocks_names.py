"""Names of Flux transformers in files of their authors, whose blocks have two streams (`double_blocks`), then one.

Unusual about these names:
- in blocks of two streams q, k and v are rows of one tensor;
- the final layer's modulation has shift before scale: the halves are swapped;
- the gain of a norm is its `scale`.
"""

from __future__ import annotations

import re
from typing import Any

from qwenimg.common.networks.layout import QKV, Layers, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

ENDS: Layers = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "norm_out.linear": Place("final_layer.adaLN_modulation.1", decode="swapped"),
}
"""Layers outside of blocks that all Flux transformers have."""
DOUBLE: Layers = {
    **{f"attn.to_{x}": Place("img_attn.qkv", Rows(i, i + 1, 3)) for i, x in QKV},
    **{f"attn.add_{x}_proj": Place("txt_attn.qkv", Rows(i, i + 1, 3)) for i, x in QKV},
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
"""The attention within a block of two streams."""
SINGLE: Layers = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}
"""The norms within a block of one stream."""
_BLOCK = re.compile(r"(?P<single>single_)?transformer_blocks\.(?P<index>\d+)\.(?P<part>.+)")


def place(name: str, ends: Layers, double: Layers, single: Layers) -> Place:
    """Return the place of a parameter, by the places of layers outside of blocks (`ends`), and within blocks of two
    streams (`double`) and of one (`single`)."""
    owner, _, leaf = name.rpartition(".")
    if (block := _BLOCK.fullmatch(owner)) is None:
        there = place_of(ends, owner)
        return there._replace(key=f"{there.key}.{leaf}")
    there = place_of(single if block["single"] else double, block["part"])
    leaf = "scale" if there.key.endswith("_norm") else leaf
    start = f"{'single' if block['single'] else 'double'}_blocks.{block['index']}"
    return there._replace(key=f"{start}.{there.key}.{leaf}")


def sizes(stored: StoredShapes) -> dict[str, Any]:
    """Return the fields of a configuration that all Flux transformers have, by stored shapes. Raises ModelError."""
    width, channels = stored.shape("x_embedder.weight", 2)
    [head_dim] = stored.shape("transformer_blocks.0.attn.norm_q.weight", 1)
    return {
        "in_channels": channels,
        "num_layers": len(stored.blocks("transformer_blocks.0.attn.norm_q.weight")),
        "num_single_layers": len(stored.blocks("single_transformer_blocks.0.attn.norm_q.weight")),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": stored.shape("context_embedder.weight", 2)[1],
    }
