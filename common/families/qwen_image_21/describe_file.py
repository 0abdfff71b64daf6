"""The description of a file that contains one part of Qwen-Image-2.1."""

from __future__ import annotations

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, of_file
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.qwen21_dit import Qwen21Config
from qwenimg.common.networks.denoisers.qwen21_names import LAYOUTS
from qwenimg.common.networks.encoders import qwen3_vl
from qwenimg.common.networks.vaes import qwen21_vae
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.texts import towers


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header, by GGUF's architecture or by the names of its tensors; None for
    another file."""
    if LAYOUTS.find_in(header) is not None:
        return "transformer"
    if qwen3_vl.is_in(header) or is_tower(header):
        return "text_encoder"
    return "vae" if any(qwen21_vae.rename(key) == qwen21_vae.SIGN for key in header.tensors) else None


def is_tower(header: Header) -> bool:
    """Return whether a file with this header is the vision tower of Qwen3-VL alone, as llama.cpp has it."""
    return towers.is_tower(header, "qwen3vl_merger")


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the part in a file: its layout, its weights, and the faults of a transformer. Return None for another
    file."""
    part = part_of(header)
    if part is None:
        return None
    whole = of_file(_layout(header, part), header, lambda key: "embd" in key)
    if part == "transformer":
        try:
            open_part(LAYOUTS, header.file.path, Qwen21Config(), part).plan.close()
        except ModelError as error:
            whole.faults.append(str(error))
            return whole
    whole.lines.append("use it: qwenimg PROMPT --transformer FILE --text-encoder FILE --vae FILE")
    return whole


def _layout(header: Header, part: str) -> str:
    if part == "text_encoder":
        if is_tower(header):
            return "the vision tower of Qwen3-VL, a text encoder: give it beside the language model's file"
        tower = any(key.startswith(qwen3_vl.TOWER) for key in header.tensors)
        return f"Qwen3-VL, a text encoder, {'with' if tower else 'without'} its vision tower"
    naming = LAYOUTS.find(header.tensors)
    names = f", {naming.layout.names}" if naming is not None and naming.layout.place is not None else ""
    names = ", in Wan's names, as ComfyUI has it" if any(".middle.0." in key for key in header.tensors) else names
    return f"Qwen-Image-2.1's {'VAE' if part == 'vae' else part}{names}"
