"""A whole model in one file, as ComfyUI saves it: which parts are in it, by the prefixes of their names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from qwenimg.common.base.safe_files import bad
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.weights.part_names import PARTS, part_of

_OPTIONS = {"transformer": "--transformer", "text_encoder": "--text-encoder", "vae": "--vae"}


def parts_of(header: Header) -> list[str]:
    """Return the parts behind prefixes of their own in a file with this header: text_encoder, vae."""
    there = {part_of(key) for key in header.tensors}
    return [part for part in PARTS if part in there]


def check_parts(path: Path, elsewhere: Collection[str]) -> None:
    """Raise ModelError if the file of a model lacks a part that is not given from `elsewhere`."""
    there = {"transformer", *parts_of(peek(path)), *elsewhere}
    if absent := [part for part in _OPTIONS if part not in there]:
        options = " ".join(f"{_OPTIONS[part]} FILE" for part in absent)
        raise bad(path, f"lacks {', '.join(absent)}: add {options}, or give a file or folder of the whole model")
