"""Flux.1's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names:
- q, k and v are rows of one tensor; in blocks of one stream the feed-forward's rows, four times as many, follow;
- the final layer's modulation has shift before scale: the halves are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.parts.authors_names import TransformerFile, count_blocks
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.weights.keys import Place, Rows

_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
    **{
        f"time_text_embed.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"), ("text", "vector"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
}
_DOUBLE = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
_NORMS = {"q": "query_norm", "k": "key_norm"}
_BLOCK = re.compile(r"(?P<single>single_)?transformer_blocks\.(?P<index>\d+)\.(?P<part>.+)\.(?P<leaf>weight|bias)")
_FUSED = re.compile(r"attn\.(?:to_(?P<image>[qkv])|add_(?P<text>[qkv])_proj)")
_NORM = re.compile(r"attn\.norm_(?P<text>added_)?(?P<kind>[qk])")
_LINEAR1 = 7  # parts of its rows: q, k, v, and four of the feed-forward


# Configuration


def _config(path: Path, shapes: Shapes, like: FluxConfig, called: Callable[[str], str]) -> FluxConfig:
    """Return the configuration of the transformer with these `shapes`, whose names `called` makes of diffusers'; the
    axes of positions are those of `like`. Raises ModelError."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(path, shapes, called(f"{name}.weight"), rank)

    width, channels = shape("x_embedder", 2)
    [head_dim] = shape("transformer_blocks.0.attn.norm_q", 1)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": shape("proj_out", 2)[0],
        "num_layers": count_blocks(shapes, "double_blocks.", "transformer_blocks."),
        "num_single_layers": count_blocks(shapes, "single_blocks.", "single_transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape("context_embedder", 2)[1],
        "pooled_projection_dim": shape("time_text_embed.text_embedder.linear_1", 2)[1],
        "guidance_embeds": called("time_text_embed.guidance_embedder.linear_1.weight") in shapes,
    }
    return parse(FluxConfig, data, source=path)


# Names


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    if block := _BLOCK.fullmatch(name):
        single, index, part, leaf = block.groups()
        there = _in_single(part) if single else _in_double(part)
        leaf = "scale" if there.key.endswith("_norm") else leaf
        return there._replace(key=f"{'single' if single else 'double'}_blocks.{index}.{there.key}.{leaf}")
    owner, _, leaf = name.rpartition(".")
    return Place(f"{_ENDS[owner]}.{leaf}", decode="swapped" if owner == "norm_out.linear" else None)


def _in_double(part: str) -> Place:
    """Return the place of a layer of a block of two streams, behind the block's name and without its leaf."""
    if norm := _NORM.fullmatch(part):
        return Place(f"{'txt' if norm['text'] else 'img'}_attn.norm.{_NORMS[norm['kind']]}")
    if fused := _FUSED.fullmatch(part):
        stream, third = ("img", fused["image"]) if fused["image"] else ("txt", fused["text"])
        index = "qkv".index(third)
        return Place(f"{stream}_attn.qkv", Rows(index, index + 1, 3))
    return Place(_DOUBLE[part])


def _in_single(part: str) -> Place:
    """Return the place of a layer of a block of one stream, behind the block's name and without its leaf."""
    if norm := _NORM.fullmatch(part):
        return Place(f"norm.{_NORMS[norm['kind']]}")
    if fused := _FUSED.fullmatch(part):
        index = "qkv".index(fused["image"])
        return Place("linear1", Rows(index, index + 1, _LINEAR1))
    if part == "proj_mlp":
        return Place("linear1", Rows(3, _LINEAR1, _LINEAR1))
    return Place(_SINGLE[part])


FILE = TransformerFile(
    network=flux_dit.NETWORK,
    title="Flux.1",
    sign="single_blocks.0.modulation.lin.weight",
    diffusers_sign="single_transformer_blocks.0.norm.linear.weight",
    place=place,
    config=_config,
)
