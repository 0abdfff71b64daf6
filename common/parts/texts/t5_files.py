"""T5 encoders in a folder or file of their own, or in the file of a whole model. Their configuration follows from the
shapes of their tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse, read_json
from qwenimg.common.base.safe_files import bad, is_file, is_folder
from qwenimg.common.formats import gguf
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import t5
from qwenimg.common.networks.encoders.t5 import T5Config
from qwenimg.common.networks.layout import Shapes, shape_of
from qwenimg.common.parts.components import component, open_component, read_config
from qwenimg.common.parts.texts import clip_files
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, plan_places
from qwenimg.common.weights.part_names import plain
from qwenimg.common.weights.plan import stored_uses

_FIRST = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"  # only version 1.1 has a gate
_SIGNS = (_FIRST, "enc.blk.0.ffn_gate.weight")  # in transformers' names, and in llama.cpp's


def prefix_of(names: Iterable[str]) -> str | None:
    """Return the prefix of the T5 encoder in a file with these `names`; None if it has none."""
    ends = ((name, sign) for name in names for sign in _SIGNS if name == sign or name.endswith(f".{sign}"))
    return next((name.removesuffix(sign) for name, sign in ends), None)


def is_alone(header: Header) -> bool:
    """Return whether a file with this header is a T5 encoder and nothing else."""
    prefix = prefix_of(header.tensors) if gguf.may_be(header, t5.NETWORK.architectures) else None
    others = (name for name in header.tensors if plain("text", name) is not None)
    return prefix is not None and all(name.startswith(prefix) for name in others)


def is_t5(path: Path) -> bool:
    """Return whether the text encoder in a folder or file is T5. Raises ModelError for a file that cannot be read."""
    if is_folder(path):
        return is_file(path / "config.json") and read_json(path / "config.json").get("model_type") == t5.MODEL_TYPE
    header = peek(path)
    return prefix_of(header.tensors) is not None and clip_files.find(header.tensors) is None


def open_t5(path: Path, title: str, *, for_rewrite: bool = False) -> Component:
    """Open the T5 encoder in the folder or file `path`; `title` is its name in messages. Raises ModelError."""
    if is_folder(path):
        return open_component(t5.NETWORK, path, read_config(t5.NETWORK, path), title, for_rewrite=for_rewrite)
    header = peek(path)
    prefix = prefix_of(header.tensors)
    if prefix is None:
        raise bad(path, f"holds no T5 encoder: it lacks {_FIRST}")

    start = (plain("text", prefix + _FIRST) or "").removesuffix(_FIRST)

    def rename(key: str) -> str | None:
        return t5.rename(key.removeprefix(start)) if key.startswith(start) else key

    return open_component(t5.NETWORK, path, config_of(header, prefix), title, rename, for_rewrite=for_rewrite)


def within(header: Header, prefix: str, title: str, *, for_rewrite: bool = False) -> Component:
    """Open the T5 encoder behind `prefix` in the file of a whole model, which has transformers' names. The caller
    closes the file. Raises ModelError."""
    config = config_of(header, prefix)
    manifest = t5.manifest(config)
    stored = {t5.rename(key.removeprefix(prefix)): key for key in sorted(header.tensors) if key.startswith(prefix)}
    places = {name: Place(stored.get(name, prefix + name)) for name in manifest}
    plan = plan_places(header, title, places, manifest, stored_uses(manifest))
    return component(t5.NETWORK, config, plan, for_rewrite=for_rewrite)


def config_of(header: Header, prefix: str) -> T5Config:
    """Return the configuration of the T5 encoder behind `prefix`. Raises ModelError."""
    path = header.file.path
    named = (
        (t5.rename(key.removeprefix(prefix)), one) for key, one in header.tensors.items() if key.startswith(prefix)
    )
    shapes: Shapes = {name: one.shape for name, one in named if name is not None}
    vocabulary, width = shape_of(path, shapes, "shared.weight", 2)
    attention = "encoder.block.0.layer.0.SelfAttention"
    buckets, heads = shape_of(path, shapes, f"{attention}.relative_attention_bias.weight", 2)
    data: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shape_of(path, shapes, f"{attention}.q.weight", 2)[0] // max(1, heads),
        "d_ff": shape_of(path, shapes, _FIRST, 2)[0],
        "num_layers": len({key.split(".")[2] for key in shapes if key.startswith("encoder.block.")}),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }
    return parse(T5Config, data, source=path)
