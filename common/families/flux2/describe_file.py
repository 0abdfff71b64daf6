"""The description of one part of FLUX.2 in a file of its own, which has no configuration."""

from __future__ import annotations

from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, summary
from qwenimg.common.families.flux2 import vae_file
from qwenimg.common.families.flux2.transformer_file import FILE
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import qwen3


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header; None for another file."""
    if FILE.reads(header):
        return "transformer"
    if vae_file.is_vae(header.tensors):
        return "vae"
    is_text = gguf.may_be(header, qwen3.NETWORK.architectures) and qwen3.is_in(header.tensors)
    return "text_encoder" if is_text else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the part in a file and its weights. Return None for another file."""
    part = part_of(header)
    if part is None:
        return None
    whose = "Qwen3, a text encoder" if part == "text_encoder" else f"FLUX.2's {part}"
    authors = part == "transformer" and FILE.prefix(header.tensors) is not None
    names = ", in its authors' names" if authors else ""
    return Description(
        lines=[
            f"layout: {whose}{names}",
            summary("file", header.tensors),
            f"use it: qwenimg PROMPT -m flux2-klein-4b --{part.replace('_', '-')} FILE",
        ]
    )
