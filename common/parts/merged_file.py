"""A whole model in one file, as ComfyUI saves it: which parts are in it, by the prefixes of their names."""

from __future__ import annotations

from qwenimg.common.formats.stored import Header
from qwenimg.common.weights.part_names import PARTS, part_of


def parts_of(header: Header) -> list[str]:
    """Return the parts behind prefixes of their own in a file with this header: text_encoder, vae."""
    there = {part_of(key) for key in header.tensors}
    return [part for part in PARTS if part in there]
