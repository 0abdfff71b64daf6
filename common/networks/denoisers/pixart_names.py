"""PixArt's transformer in files: its authors' names, which ComfyUI has too, and diffusers'.

Unusual about its authors' names: q, k and v of the attention to the image are rows of one tensor, k and v of that to
the text of another. Their files have more than the transformer: positions, and the states of an empty caption, whose
number is the length of texts."""

from __future__ import annotations

import re
from math import isqrt
from typing import Any

from qwenimg.common.networks.denoisers import pixart_dit
from qwenimg.common.networks.denoisers.pixart_dit import PATCH, SIZES, TABLE, PixArtConfig
from qwenimg.common.networks.layout import QKV, Layers, Layout, Layouts, StoredShapes, place_of
from qwenimg.common.weights.keys import Place, Rows

EMPTY_CAPTION = "y_embedder.y_embedding"
SEES_SIZE = re.compile(r"(?:^|\.)(?:csize_embedder|resolution_embedder)\.")
"""Names of tensors that only a model has which sees the size of its pictures."""
_POSITIONS = "pos_embed"
_EMB = "adaln_single.emb"
_EMBEDDERS = {"timestep_embedder": "t_embedder", SIZES[0]: "csize_embedder", SIZES[1]: "ar_embedder"}
_ENDS = {
    "pos_embed.proj": "x_embedder.proj",
    **{f"{_EMB}.{ours}.linear_1": f"{theirs}.mlp.0" for ours, theirs in _EMBEDDERS.items()},
    **{f"{_EMB}.{ours}.linear_2": f"{theirs}.mlp.2" for ours, theirs in _EMBEDDERS.items()},
    "adaln_single.linear": "t_block.1",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "proj_out": "final_layer.linear",
}
_IN_BLOCK: Layers = {
    **{f"attn1.to_{x}": Place("attn.qkv", Rows(i, i + 1, 3)) for i, x in QKV},
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_k": Place("cross_attn.kv_linear", Rows(0, 1, 2)),
    "attn2.to_v": Place("cross_attn.kv_linear", Rows(1, 2, 2)),
    "attn2.to_out.0": "cross_attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
_BLOCK = re.compile(r"transformer_blocks\.(\d+)\.(.+)\.(weight|bias)")


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if block := _BLOCK.fullmatch(name):
        layer, part, leaf = block.groups()
        if part == TABLE:
            return Place(f"blocks.{layer}.{TABLE}")
        there = place_of(_IN_BLOCK, part)
        return there._replace(key=f"blocks.{layer}.{there.key}.{leaf}")
    if name == f"{TABLE}.weight":
        return Place(f"final_layer.{TABLE}")
    owner, _, leaf = name.rpartition(".")
    return Place(f"{_ENDS[owner]}.{leaf}")


def _config(stored: StoredShapes, like: PixArtConfig) -> PixArtConfig:
    """Return the configuration for stored shapes; the width of a head, and the size of pictures in a file without
    positions, are those of `like`."""
    [width] = stored.shape("pos_embed.proj.bias", 1)
    data: dict[str, Any] = {
        "num_attention_heads": width // like.attention_head_dim,
        "in_channels": stored.shape("pos_embed.proj.weight", 4)[1],
        "out_channels": stored.shape("proj_out.bias", 1)[0] // PATCH**2,
        "num_layers": len(stored.blocks(f"transformer_blocks.0.{TABLE}.weight")),
        "cross_attention_dim": width,
        "caption_channels": stored.shape("caption_projection.linear_1.weight", 2)[1],
        "use_additional_conditions": f"{_EMB}.{SIZES[0]}.linear_1.bias" in stored,
    }
    positions = stored.shapes.get(_POSITIONS, ())
    if len(positions) == 3 and (side := PATCH * isqrt(positions[1])) != like.sample_size:
        data |= {"sample_size": side, "interpolation_scale": side / 64}
    return stored.config(like, **data)


LAYOUTS = Layouts(
    network=pixart_dit.NETWORK,
    title="PixArt",
    rows=(
        Layout(
            names="its authors' names, as ComfyUI has it",
            signs=("t_block.1.weight", "blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.fc1.weight"),
            place=lambda name, config: place(name),
        ),
        Layout(names="diffusers' names", signs=("adaln_single.linear.weight", "caption_projection.linear_1.weight")),
    ),
    config=_config,
    ignored=(_POSITIONS, EMPTY_CAPTION),
    foreign={
        "blocks.0.attn.sr.weight": "a PixArt-Sigma that joins keys and values, which this version does not draw with"
    },
)
