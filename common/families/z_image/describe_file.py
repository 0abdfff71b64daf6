"""The description of one part of Z-Image in a file of its own, by its header alone."""

from __future__ import annotations

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, of_file, of_merged, summary
from qwenimg.common.families.z_image.checkpoint import open_parts
from qwenimg.common.families.z_image.known import TURBO
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.denoisers.zimage_names import LAYOUTS
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts import known_configs, merged_file, vae_files
from qwenimg.common.parts.open_file import open_part

_USE = "use it: qwenimg PROMPT --transformer FILE --text-encoder FILE --vae FILE"


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header, by GGUF's architecture and the names of its tensors, or `model` for
    several; None for another file."""
    if LAYOUTS.find_in(header) is not None:
        return "model" if merged_file.parts_of(header) else "transformer"
    if gguf.may_be(header, qwen3.NETWORK.architectures) and qwen3.is_in(header.tensors):
        return "text_encoder"
    return "vae" if vae_files.latent_channels(header.tensors) == kl_vae.FLUX_1.latent_channels else None


def is_model(header: Header) -> bool:
    """Return whether a file with this header has another part of the model beside the transformer."""
    return part_of(header) == "model"


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the transformer in a file: its layout, its weights, and its faults. Return None for another file."""
    other = LAYOUTS.similar_model(header.tensors)
    part = part_of(header)
    if other is None and part not in ("transformer", "model"):
        return None
    if other is not None:
        return Description(lines=[f"layout: {other}", summary("file", header.tensors)], faults=[f"is {other}"])
    if part == "model":
        return of_merged("Z-Image, single file", header, open_parts)
    whole = of_file(_layout(header), header, lambda key: "pad_token" in key)
    try:
        like = known_configs.read(TURBO.name, "transformer", zimage_dit.NETWORK)
        open_part(LAYOUTS, header.file.path, like, "transformer").plan.close()
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    whole.lines.append(_USE)
    return whole


def _layout(header: Header) -> str:
    layout, prefix = LAYOUTS.find(header.tensors) or (LAYOUTS.rows[0], "")
    file = "GGUF, " if header.format == "GGUF" else ""
    return f"{file}Z-Image's transformer, {layout.names}{f', behind {prefix}' if prefix else ''}"
