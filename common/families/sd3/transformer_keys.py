"""Stable Diffusion 3's transformer in files with its authors' names: its configuration, and each parameter's place.

Unusual about these names:
- q, k and v are rows of one tensor;
- the final layer's modulation, and that of the text in the last block, have shift before scale: the halves are swapped;
- the table of positions may be missing, since it follows from the width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from math import isqrt
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers.sd3_dit import TABLE, SD3Config
from qwenimg.common.parts import authors_names
from qwenimg.common.parts.authors_names import QKV, Layers, place_of
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.parts.ldm_keys import Places
from qwenimg.common.weights.keys import Place, Rows

TABLE_KEY = "pos_embed"
SIGN = "joint_blocks.0.context_block.attn.qkv.weight"
HEAD_DIM = 64
_PUBLISHED_SIZES = {False: 192, True: 384}  # of the table of positions, without and with a second attention

_ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_IN_BLOCK: Layers = {
    **{f"{name}.to_{x}": Place(f"x_block.{name}.qkv", Rows(i, i + 1, 3)) for name in ("attn", "attn2") for i, x in QKV},
    **{f"attn.add_{x}_proj": Place("context_block.attn.qkv", Rows(i, i + 1, 3)) for i, x in QKV},
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "attn.to_add_out": "context_block.attn.proj",
    **{f"{name}.to_out.0": f"x_block.{name}.proj" for name in ("attn", "attn2")},
    **{f"{name}.norm_{x}": f"x_block.{name}.ln_{x}" for name in ("attn", "attn2") for x in "qk"},
    **{f"attn.norm_added_{x}": f"context_block.attn.ln_{x}" for x in "qk"},
}
_BLOCK = re.compile(r"transformer_blocks\.(\d+)\.(.+)\.(weight|bias)")


def prefix_of(tensors: Collection[str]) -> str | None:
    """Return the prefix of the transformer's names; None in a file without it."""
    return authors_names.prefix_of(tensors, SIGN)


def config_of(path: Path, shapes: Shapes) -> SD3Config:
    """Return the configuration of the transformer with these tensors. Raises ModelError."""
    width, channels, *_ = shape_of(path, shapes, "x_embedder.proj.weight", 4)
    blocks = {int(match[1]) for key in shapes if (match := re.match(r"joint_blocks\.(\d{1,4})\.", key))}
    dual = [layer for layer in sorted(blocks) if f"joint_blocks.{layer}.x_block.attn2.qkv.weight" in shapes]
    norm = "joint_blocks.0.x_block.attn.ln_q.weight"
    head_dim = shape_of(path, shapes, norm, 1)[0] if norm in shapes else HEAD_DIM
    table = shapes.get(TABLE_KEY)
    data: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": shape_of(path, shapes, "final_layer.linear.weight", 2)[0] // 4,
        "num_layers": len(blocks),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape_of(path, shapes, "context_embedder.weight", 2)[1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shape_of(path, shapes, "y_embedder.mlp.0.weight", 2)[1],
        "pos_embed_max_size": isqrt(table[-2]) if table and len(table) > 1 else _PUBLISHED_SIZES[bool(dual)],
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if norm in shapes else None,
    }
    return parse(SD3Config, data, source=path)


def places(names: Iterable[str], config: SD3Config, prefix: str) -> Places:
    """Map each parameter of the transformer to its place behind `prefix`."""
    return authors_names.places(names, prefix, lambda name: _place(name, config))


def _place(name: str, config: SD3Config) -> Place:
    if name == TABLE:
        return Place(TABLE_KEY)
    if block := _BLOCK.fullmatch(name):
        layer, part, leaf = block.groups()
        there = place_of(_IN_BLOCK, part)
        if part == "norm1_context.linear" and int(layer) == config.num_layers - 1:
            there = there._replace(decode="swapped")
        return there._replace(key=f"joint_blocks.{layer}.{there.key}.{leaf}")
    owner, _, leaf = name.rpartition(".")
    return Place(f"{_ENDS[owner]}.{leaf}", decode="swapped" if owner == "norm_out.linear" else None)
