"""Qwen-Image-2.1's transformer in one file: configuration, and place of each parameter.

The names are diffusers', behind a prefix or none. Unusual about ComfyUI's files: the feed-forward's two layers of the
same input are rows of one tensor, the gate's first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen21_dit
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.parts.authors_names import TransformerFile, count_blocks
from qwenimg.common.parts.ldm_configs import Shapes, shape_of
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, Rows

_SIGN = "txt_in.text_norm.weight"
_FUSED = "transformer_blocks.0.img_mlp.gate_up.weight"
_HALVES = {".img_mlp.gate_layer.weight": 0, ".img_mlp.proj.weight": 1}


def _config(path: Path, shapes: Shapes, like: Qwen21Config, place: Callable[[str], str]) -> Qwen21Config:
    """Return the configuration of the transformer with these tensors; the axes of positions are those of `like`. Raise
    ModelError."""
    width, channels = shape_of(path, shapes, "img_in.weight", 2)
    [head_dim] = shape_of(path, shapes, "transformer_blocks.0.attn.norm_q.weight", 1)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // max(1, head_dim),
        "context_in_dim": shape_of(path, shapes, _SIGN, 1)[0],
        "mlp_ratio": shape_of(path, shapes, "transformer_blocks.0.img_mlp.out.weight", 2)[1] // max(1, width),
    }
    return parse(Qwen21Config, data, source=path)


def place(name: str) -> Place:
    """Return the place of a parameter in a file whose feed-forward is fused."""
    for end, half in _HALVES.items():
        if name.endswith(end):
            return Place(name.replace(end, ".img_mlp.gate_up.weight"), Rows(half, half + 1, 2))
    return Place(name)


PLAIN = TransformerFile(
    network=qwen21_dit.NETWORK, title="Qwen-Image-2.1", sign=_SIGN, diffusers_sign=_SIGN, place=Place, config=_config
)
FUSED = replace(PLAIN, sign=_FUSED, diffusers_sign=_FUSED, place=place)


def file_of(header: Header) -> TransformerFile:
    """Return the kind of the file with this header."""
    return FUSED if FUSED.prefix(header.tensors) is not None else PLAIN


def open_transformer(path: Path, like: Qwen21Config, *, whole: bool = False) -> Component:
    """Open the transformer in a folder or a file. Its sizes are those of the file; `like` has the fields that no
    tensor shows. Raises ModelError."""
    if is_folder(path):
        return PLAIN.open(path, like, whole=whole)
    return file_of(peek(path)).open(path, like, whole=whole)
