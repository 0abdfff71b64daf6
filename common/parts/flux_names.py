"""Names of Flux transformers in files of their authors, whose blocks have two streams (`double_blocks`), then one.

Unusual about these names:
- in blocks of two streams q, k and v are rows of one tensor;
- the final layer's modulation has shift before scale: the halves are swapped;
- the gain of a norm is its `scale`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwenimg.common.parts.authors_names import count_blocks, qkv, renamed
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.weights.keys import Place

_BLOCK = re.compile(r"(?P<single>single_)?transformer_blocks\.(?P<index>\d+)\.(?P<part>.+)")


ENDS = {
    **renamed({"x_embedder": "img_in", "context_embedder": "txt_in", "proj_out": "final_layer.linear"}),
    "norm_out.linear": Place("final_layer.adaLN_modulation.1", decode="swapped"),
}
"""The places of layers outside of blocks that all Flux transformers have."""
ATTENTION = {
    **qkv([f"attn.to_{x}" for x in "qkv"], "img_attn.qkv"),
    **qkv([f"attn.add_{x}_proj" for x in "qkv"], "txt_attn.qkv"),
    **renamed(
        {
            "attn.to_out.0": "img_attn.proj",
            "attn.to_add_out": "txt_attn.proj",
            "attn.norm_q": "img_attn.norm.query_norm",
            "attn.norm_k": "img_attn.norm.key_norm",
            "attn.norm_added_q": "txt_attn.norm.query_norm",
            "attn.norm_added_k": "txt_attn.norm.key_norm",
        }
    ),
}
"""The places of attention's layers within a block of two streams."""
NORMS = renamed({"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"})
"""The places of the norms within a block of one stream."""


def embedders(start: str, names: Mapping[str, str]) -> dict[str, Place]:
    """Map both layers of each embedder, which is at `start` and has one of our `names`, to theirs."""
    return renamed(
        {
            f"{start}.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
            for ours, theirs in names.items()
            for i, layer in ((1, "in_layer"), (2, "out_layer"))
        }
    )


def places(
    ends: Mapping[str, Place], double: Mapping[str, Place], single: Mapping[str, Place]
) -> Callable[[str], Place]:
    """Return the function that gives a parameter's place, by those of layers: outside of blocks, and within blocks of
    two streams and of one."""

    def place(name: str) -> Place:
        owner, _, leaf = name.rpartition(".")
        if (block := _BLOCK.fullmatch(owner)) is None:
            return ends[owner]._replace(key=f"{ends[owner].key}.{leaf}")
        there = (single if block["single"] else double)[block["part"]]
        leaf = "scale" if there.key.endswith("_norm") else leaf
        start = f"{'single' if block['single'] else 'double'}_blocks.{block['index']}"
        return there._replace(key=f"{start}.{there.key}.{leaf}")

    return place


def sizes(path: Path, shapes: Shapes, called: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of a configuration that all Flux transformers have, by `shapes`. `called` makes their names of
    diffusers'. Raises ModelError."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(path, shapes, called(f"{name}.weight"), rank)

    width, channels = shape("x_embedder", 2)
    [head_dim] = shape("transformer_blocks.0.attn.norm_q", 1)
    return {
        "in_channels": channels,
        "num_layers": count_blocks(shapes, "double_blocks.", "transformer_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks.", "single_transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape("context_embedder", 2)[1],
    }
