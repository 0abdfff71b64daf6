"""Flux.2's transformer in one file, with its authors' names or diffusers': configuration, and place of each parameter.

Unusual about its authors' names:
- in blocks of two streams q, k and v are rows of one tensor; in blocks of one stream every layer is one tensor in
  diffusers' names too;
- the final layer's modulation has shift before scale: the halves are swapped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad, is_folder
from qwenimg.common.formats.headers import read_header
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import flux2_dit
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.parts import authors_names
from qwenimg.common.parts.components import open_component, read_config
from qwenimg.common.parts.ldm_configs import Shapes, behind, shape_of
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, Rows, check_architecture

SIGN = "single_stream_modulation.lin.weight"
DIFFUSERS_SIGN = "single_stream_modulation.linear.weight"

_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
    **{
        f"time_guidance_embed.{ours}_embedder.linear_{i}": f"{theirs}_in.{layer}"
        for ours, theirs in (("timestep", "time"), ("guidance", "guidance"))
        for i, layer in ((1, "in_layer"), (2, "out_layer"))
    },
    **{
        f"{name}.linear": f"{name}.lin"
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
}
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
}
_SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
_BLOCK = re.compile(r"(?P<single>single_)?transformer_blocks\.(?P<index>\d+)\.(?P<part>.+)\.weight")
_FUSED = re.compile(r"attn\.(?:to_(?P<image>[qkv])|add_(?P<text>[qkv])_proj)")
_STARTS = {
    "double": ("double_blocks.", "transformer_blocks."),
    "single": ("single_blocks.", "single_transformer_blocks."),
}


def prefix_of(names: Collection[str]) -> str | None:
    """Return the prefix of the transformer's names, its authors', in a file with these `names`; None without it."""
    return authors_names.prefix_of(names, SIGN)


def is_transformer(header: Header) -> bool:
    """Return whether a file with this header has the transformer, under its authors' or diffusers' names."""
    return prefix_of(header.tensors) is not None or DIFFUSERS_SIGN in header.tensors


def open_transformer(path: Path, like: Flux2Config, *, whole: bool = False) -> Component:
    """Open the transformer in a folder, or in a file, alone or with a whole model. Its sizes are those of the file;
    what shapes do not show, the axes of positions, is that of `like`. Raises ModelError."""
    network, title = flux2_dit.NETWORK, "transformer"
    if is_folder(path):
        return open_component(network, path, read_config(network, path), title, whole=whole)
    header = read_header(path)
    try:
        check_architecture(header, network.architectures, title)
        prefix = prefix_of(header.tensors)
        if prefix is None and DIFFUSERS_SIGN not in header.tensors:
            raise bad(path, "holds no transformer of FLUX.2, by its authors' names or diffusers'")
        config = config_of(path, behind(header, prefix or ""), like, authors=prefix is not None)
        if prefix is not None:
            return authors_names.open_transformer(header, prefix, network, config, place, "FLUX.2", whole=whole)
    except BaseException:
        header.file.close()
        raise
    header.file.close()
    return open_component(network, path, config, title, whole=whole)


def config_of(path: Path, shapes: Shapes, like: Flux2Config, *, authors: bool) -> Flux2Config:
    """Return the configuration of the transformer with these tensors, in its authors' names or in diffusers'; the axes
    of positions are those of `like`. Raises ModelError."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        return shape_of(path, shapes, place(name).key if authors else name, rank)

    def count(kind: str) -> int:
        return len({key.split(".")[1] for key in shapes if key.startswith(_STARTS[kind])})

    width, channels = shape("x_embedder.weight", 2)
    [head_dim] = shape("transformer_blocks.0.attn.norm_q.weight", 1)
    guidance = "time_guidance_embed.guidance_embedder.linear_1.weight"
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": None,
        "num_layers": count("double"),
        "num_single_layers": count("single"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "joint_attention_dim": shape("context_embedder.weight", 2)[1],
        "timestep_guidance_channels": shape("time_guidance_embed.timestep_embedder.linear_1.weight", 2)[1],
        "mlp_ratio": shape("transformer_blocks.0.ff.linear_out.weight", 2)[1] / max(1, width),
        "guidance_embeds": (place(guidance).key if authors else guidance) in shapes,
    }
    return parse(Flux2Config, data, source=path)


def place(name: str) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        owner = name.removesuffix(".weight")
        return Place(f"{_ENDS[owner]}.weight", decode="swapped" if owner == "norm_out.linear" else None)
    start = f"{'single' if block['single'] else 'double'}_blocks.{block['index']}"
    if not block["single"] and (fused := _FUSED.fullmatch(block["part"])):
        third = "qkv".index(fused["image"] or fused["text"])
        return Place(f"{start}.{'img' if fused['image'] else 'txt'}_attn.qkv.weight", Rows(third, third + 1, 3))
    theirs = (_SINGLE if block["single"] else _DOUBLE)[block["part"]]
    return Place(f"{start}.{theirs}.{'scale' if theirs.endswith('_norm') else 'weight'}")
