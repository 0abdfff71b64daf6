"""Flux.1's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names:
- q, k and v are rows of one tensor; in blocks of one stream the feed-forward's rows, four times as many, follow;
- the final layer's modulation has shift before scale: the halves are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad, is_folder
from qwenimg.common.formats.headers import read_header
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.denoisers import flux_dit
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.parts import authors_names
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.ldm_configs import Shapes, behind, shape_of
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, Rows, check_architecture

SIGN = "single_blocks.0.modulation.lin.weight"
DIFFUSERS_SIGN = "single_transformer_blocks.0.norm.linear.weight"

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
_BLOCKS = {
    "double_blocks": "double",
    "transformer_blocks": "double",
    "single_blocks": "single",
    "single_transformer_blocks": "single",
}
_FUSED = re.compile(r"attn\.(?:to_(?P<image>[qkv])|add_(?P<text>[qkv])_proj)")
_NORM = re.compile(r"attn\.norm_(?P<text>added_)?(?P<kind>[qk])")
_LINEAR1 = 7  # parts of its rows: q, k, v, and four of the feed-forward


def prefix_of(names: Collection[str]) -> str | None:
    """Return the prefix of the transformer's names, its authors', in a file with these `names`; None without it."""
    return authors_names.prefix_of(names, SIGN)


def is_transformer(header: Header) -> bool:
    """Return whether a file with this header has the transformer, under its authors' or diffusers' names."""
    return prefix_of(header.tensors) is not None or DIFFUSERS_SIGN in header.tensors


def open_transformer(path: Path, like: FluxConfig, *, whole: bool = False) -> Component:
    """Open the transformer in a folder, or in a file, alone or with a whole model. Its sizes are those of the file;
    what shapes do not show, the axes of positions, is that of `like`. Raises ModelError."""
    network, title = flux_dit.NETWORK, "transformer"
    if is_folder(path):
        return open_component(network, path, read_config(network, path), title, whole=whole)
    header = read_header(path)
    try:
        check_architecture(header, network.architectures, title)
        prefix = prefix_of(header.tensors)
        if prefix is not None:
            config = config_of(path, behind(header, prefix), like, {name: place(name).key for name in _sizes()})
            return authors_names.open_transformer(header, prefix, network, config, place, "Flux.1", whole=whole)
        if DIFFUSERS_SIGN not in header.tensors:
            raise bad(path, "holds no transformer of Flux.1, by its authors' names or diffusers'")
        config = config_of(path, _shapes(header.tensors), like, {name: name for name in _sizes()})
    except BaseException:
        header.file.close()
        raise
    header.file.close()
    return open_component(network, path, config, title, whole=whole)


# Configuration


def _sizes() -> tuple[str, ...]:
    """Return the names of the parameters whose shapes show the sizes of a model."""
    embed = "time_text_embed"
    return (
        "x_embedder.weight",
        "context_embedder.weight",
        "proj_out.weight",
        f"{embed}.text_embedder.linear_1.weight",
        f"{embed}.guidance_embedder.linear_1.weight",
        "transformer_blocks.0.attn.norm_q.weight",
    )


def config_of(path: Path, shapes: Shapes, like: FluxConfig, names: Mapping[str, str]) -> FluxConfig:
    """Return the configuration of the transformer with these tensors, which has `names` {diffusers' name: the file's}
    for those of `_sizes`; the axes of positions are those of `like`. Raises ModelError."""
    img_in, txt_in, out, pooled, guidance, norm = (names[name] for name in _sizes())
    width, channels = shape_of(path, shapes, img_in, 2)
    [head_dim] = shape_of(path, shapes, norm, 1)
    blocks = {(_BLOCKS[parts[0]], parts[1]) for key in shapes if (parts := key.split(".", 2))[0] in _BLOCKS}
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": shape_of(path, shapes, out, 2)[0],
        "num_layers": sum(kind == "double" for kind, _ in blocks),
        "num_single_layers": sum(kind == "single" for kind, _ in blocks),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape_of(path, shapes, txt_in, 2)[1],
        "pooled_projection_dim": shape_of(path, shapes, pooled, 2)[1],
        "guidance_embeds": guidance in shapes,
    }
    return parse(FluxConfig, data, source=path)


def _shapes(tensors: Mapping[str, Stored]) -> Shapes:
    return {name: tensor.shape for name, tensor in tensors.items()}


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
