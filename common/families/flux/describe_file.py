"""The description of one part of Flux.1 in a file of its own."""

from __future__ import annotations

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, in_memory, summary
from qwenimg.common.families.flux import variants
from qwenimg.common.families.flux.transformer_file import FILE
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.parts.vae_files import open_vae

CLIP_WIDTH = 768  # of CLIP-L
_INPUTS = {384: "Fill: it has a mask as an input", 128: "for control images, not supported"}


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header, by GGUF's architecture or by the names of its tensors; None for
    another file."""
    if FILE.reads(header):
        return "transformer"
    if t5_files.is_alone(header) or clip_files.width_alone(header.tensors) == CLIP_WIDTH:
        return "text_encoder"
    return "vae" if vae_files.latent_channels(header.tensors) == kl_vae.FLUX_1.latent_channels else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the transformer or the VAE in a file: its layout, its weights, and its faults. Return None for another
    file."""
    part, path = part_of(header), header.file.path
    if part not in ("transformer", "vae"):
        return None
    whole = Description(lines=[f"layout: {_layout(header, part)}", summary("file", header.tensors)])
    if header.format == "GGUF":
        whole.lines.append(in_memory(header.tensors, lambda name: False))
    try:
        if part == "vae":
            opened = open_vae(path, kl_vae.FLUX_1)
        else:
            opened = FILE.open(path, FluxConfig())
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    opened.plan.close()
    if part == "transformer":
        guided = "dev: it is told its guidance" if opened.config.guidance_embeds else "schnell: without guidance"
        named = "Kontext, by its name: it is told its guidance" if variants.of_name(path.name) else guided
        whole.lines.insert(1, f"type: {_INPUTS.get(opened.config.in_channels, named)}")
    whole.lines.append(f"use it: qwenimg PROMPT -m FOLDER --{part} FILE")
    return whole


def _layout(header: Header, part: str) -> str:
    """Return the part and the layout of its names."""
    kind = "GGUF, " if header.format == "GGUF" else ""
    if part == "vae":
        names = "ldm" if vae_files.SIGN in header.tensors else "diffusers'"
        return f"{kind}a VAE for latents of {kl_vae.FLUX_1.latent_channels} channels, {names} names"
    prefix = FILE.prefix(header.tensors)
    names = "diffusers' names" if prefix is None else "its authors' names"
    return f"{kind}Flux.1's transformer, {names}{f' behind {prefix}' if prefix else ''}"
