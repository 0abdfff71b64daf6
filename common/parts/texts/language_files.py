"""The sizes of a language model in a file of a whole model, by the shapes of its tensors."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.safe_files import bad
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.layout import Shapes, shape_of
from qwenimg.common.weights.keys import Rename

_LAYER = re.compile(r"layers\.(\d{1,3})\.")
_NORM = "layers.0.self_attn.q_norm.weight"


def sizes(header: Header, rename: Rename, head_dim: int) -> dict[str, int]:
    """Return the fields of a configuration that have the sizes of the text encoder in a file. rename: gives a tensor's
    name in the manifest, None for one of another part; head_dim: the published width of a head, for a model without
    norms of q and k, whose tensors do not show it. Raises ModelError."""
    path = header.file.path
    shapes: Shapes = {name: one.shape for key, one in header.tensors.items() if (name := rename(key)) is not None}
    if _NORM in shapes:
        [head_dim] = shape_of(path, shapes, _NORM, 1)
    vocabulary, width = shape_of(path, shapes, "embed_tokens.weight", 2)
    query, key = (shape_of(path, shapes, f"layers.0.self_attn.{name}_proj.weight", 2)[0] for name in "qk")
    heads, keys = (_heads(path, rows, head_dim) for rows in (query, key))
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape_of(path, shapes, "layers.0.mlp.gate_proj.weight", 2)[0],
        "num_hidden_layers": len({match[1] for name in shapes if (match := _LAYER.match(name))}),
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    } | ({"head_dim": head_dim} if _NORM in shapes else {})


def _heads(path: Path, rows: int, head_dim: int) -> int:
    if not head_dim or rows % head_dim:
        cure = "give it with its configuration by --text-encoder FOLDER"
        raise bad(path, f"has a text encoder of {rows} rows for its heads, no multiple of {head_dim}: {cure}")
    return rows // head_dim
