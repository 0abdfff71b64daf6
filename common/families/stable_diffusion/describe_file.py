"""The description of a Stable Diffusion model in one file."""

from __future__ import annotations

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, component_line, of_file, summary
from qwenimg.common.families.stable_diffusion import single_file
from qwenimg.common.formats.stored import Header
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.texts import clip_files

_UNET_SIGN = "time_embedding.linear_1.weight"  # under diffusers' names


def part_of(header: Header) -> str | None:
    """Return `model` for a whole model in one file, else the part in it; None for another file."""
    if single_file.reads(header):
        unet, vae = single_file.prefixes(header.tensors)
        return "model" if unet is not None and vae is not None else "vae" if unet is None else "transformer"
    if clip_files.width_alone(header.tensors) is not None:
        return "text_encoder"
    if header.format == "GGUF":
        return None
    if _UNET_SIGN in header.tensors:
        return "transformer"
    return "vae" if vae_files.latent_channels(header.tensors) == single_file.LATENTS else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the file: its type and the reasons for it, its parts, and its faults. Return None for another file."""
    if not single_file.is_single_file(header.tensors):
        text = clip_files.described(header.tensors)
        return Description(lines=[f"layout: {text}", summary("file", header.tensors)]) if text else None
    form = "GGUF, " if header.format == "GGUF" else ""
    layout = f"{form}Stable Diffusion, single file"
    whole = of_file(layout, header, lambda name: name.endswith("token_embedding.weight"))
    try:
        detected = single_file.detect(header, prediction)
        whole.lines[1:1] = [*detected.reasons, *(f"warning: {line}" for line in detected.warnings)]
        opened = single_file.open_file(header.file.path, prediction)
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    opened.close()
    for name, plan in opened.plans.items():
        whole.lines.append(component_line(name, plan))
    if opened.ignored:
        whole.lines.append(f"known and not needed: {counted(opened.ignored, 'tensor')}")
    return whole
