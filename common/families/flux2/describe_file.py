"""The description of one part of FLUX.2 in a file of its own, which has no configuration."""

from __future__ import annotations

from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, summary
from qwenimg.common.families.flux2 import transformer_file, vae_file
from qwenimg.common.formats.stored import Header

_TEXT_SIGN = "layers.0.self_attn.q_norm.weight"


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header; None for another file."""
    if transformer_file.is_transformer(header):
        return "transformer"
    if vae_file.is_vae(header.tensors):
        return "vae"
    return "text_encoder" if any(prefix + _TEXT_SIGN in header.tensors for prefix in ("", "model.")) else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the part in a file and its weights. Return None for another file."""
    part = part_of(header)
    if part is None:
        return None
    whose = "Qwen3, a text encoder" if part == "text_encoder" else f"FLUX.2's {part}"
    authors = part == "transformer" and transformer_file.prefix_of(header.tensors) is not None
    names = ", in its authors' names" if authors else ""
    return Description(
        lines=[
            f"layout: {whose}{names}",
            summary("file", header.tensors),
            f"use it: qwenimg PROMPT -m flux2-klein-4b --{part.replace('_', '-')} FILE",
        ]
    )
