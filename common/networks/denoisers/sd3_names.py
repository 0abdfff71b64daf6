"""Stable Diffusion 3's transformer in files: its authors' names, and diffusers'.

Unusual about its authors' names:
- q, k and v are rows of one tensor;
- the final layer's modulation, and that of the text in the last block, have shift before scale: the halves are swapped;
- the table of positions may be missing, since it follows from the width.
"""

from __future__ import annotations

import re
from math import isqrt
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import sd3_dit
from qwenimg.common.networks.denoisers.sd3_dit import TABLE, SD3Config
from qwenimg.common.networks.layout import QKV, Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

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


def place(name: str, config: SD3Config) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if name == TABLE:
        return Place("pos_embed")
    if block := _BLOCK.fullmatch(name):
        layer, part, leaf = block.groups()
        there = place_of(_IN_BLOCK, part)
        if part == "norm1_context.linear" and int(layer) == config.num_layers - 1:
            there = there._replace(decode="swapped")
        return there._replace(key=f"joint_blocks.{layer}.{there.key}.{leaf}")
    owner, _, leaf = name.rpartition(".")
    return Place(f"{_ENDS[owner]}.{leaf}", decode="swapped" if owner == "norm_out.linear" else None)


def _config(stored: StoredShapes, like: SD3Config) -> SD3Config:
    """Return the configuration for stored shapes."""
    width, channels, *_ = stored.shape("pos_embed.proj.weight", 4)
    blocks = stored.blocks("transformer_blocks.0.attn.to_q.weight")
    dual = [layer for layer in blocks if f"transformer_blocks.{layer}.attn2.to_q.weight" in stored]
    norm = "transformer_blocks.0.attn.norm_q.weight"
    head_dim = stored.shape(norm, 1)[0] if norm in stored else HEAD_DIM
    table = stored.shapes.get(stored.stored_name(TABLE))
    data: dict[str, Any] = {
        "in_channels": channels,
        "out_channels": stored.shape("proj_out.weight", 2)[0] // 4,
        "num_layers": len(blocks),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": stored.shape("context_embedder.weight", 2)[1],
        "caption_projection_dim": width,
        "pooled_projection_dim": stored.shape("time_text_embed.text_embedder.linear_1.weight", 2)[1],
        "pos_embed_max_size": isqrt(table[-2]) if table and len(table) > 1 else _PUBLISHED_SIZES[bool(dual)],
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if norm in stored else None,
    }
    return parse(SD3Config, data, source=stored.path)


LAYOUTS = Layouts(
    network=sd3_dit.NETWORK,
    title="Stable Diffusion 3",
    rows=(
        Layout(names="its authors' names", signs=("joint_blocks.0.context_block.attn.qkv.weight",), place=place),
        Layout(
            names="diffusers' names", signs=("pos_embed.pos_embed", "transformer_blocks.0.norm1_context.linear.weight")
        ),
    ),
    config=_config,
)
