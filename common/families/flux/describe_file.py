"""The description of one part of Flux.1 in a file of its own."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Choices, Prediction
from qwenimg.common.families.description import Description, component_line, of_file, summary
from qwenimg.common.families.flux import single_file, variants
from qwenimg.common.families.flux.checkpoint import is_schnell
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.networks.denoisers.flux_names import LAYOUTS
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.weights.plan import closed_on_failure

CLIP_WIDTH = 768  # of CLIP-L
_USES = {
    "transformer": "use it: qwenimg PROMPT --transformer FILE --text-encoder CLIP-L --text-encoder T5 --vae FILE",
    "vae": "use it: qwenimg PROMPT -m MODEL --vae FILE",
}
_INPUTS = {384: "Fill: it has a mask as an input", 128: "for control images, not supported"}


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header, by GGUF's architecture or by the names of its tensors; None for
    another file."""
    if single_file.is_model(header):
        return "model"
    if LAYOUTS.find_in(header) is not None:
        return "transformer"
    if t5_files.is_alone(header) or clip_files.width_alone(header.tensors) == CLIP_WIDTH:
        return "text_encoder"
    return "vae" if vae_files.latent_channels(header.tensors) == kl_vae.FLUX_1.latent_channels else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe a model in one file, or its transformer or VAE: its layout, its weights, and its faults. Return None for
    another file."""
    part, path = part_of(header), header.file.path
    if part == "model":
        return _describe_model(header)
    if part not in ("transformer", "vae"):
        return None
    whole = of_file(_layout(header, part), header)
    try:
        layouts, like = (kl_vae_names.LAYOUTS, kl_vae.FLUX_1) if part == "vae" else (LAYOUTS, FluxConfig())
        opened = open_part(layouts, path, like, part)
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    opened.plan.close()
    if part == "transformer":
        whole.lines.insert(1, _type(path, opened.config))
    whole.lines.append(_USES[part])
    return whole


def _describe_model(header: Header) -> Description:
    path, parts = header.file.path, single_file.parts_of(header)
    whole = Description(lines=["layout: Flux.1, single file", summary("file", header.tensors)])
    try:
        with closed_on_failure() as keep:
            opened = {name: single_file.open_part(path, name) for name in parts}
            for part in opened.values():
                keep(part.plan)
            single_file.check_known(path, opened, ())
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    whole.lines.insert(1, _type(path, opened["transformer"].config))
    for name, part in opened.items():
        part.plan.close()
        whole.lines.append(component_line(name, part.plan))
    if lacking := [name for name in ("text_encoder", "text_encoder_2", "vae") if name not in parts]:
        whole.lines.append(f"lacks: {', '.join(lacking)}; add them by --text-encoder and --vae, once for each")
    return whole


def _type(path: Path, config: FluxConfig) -> str:
    """Return the line with the variant, by the transformer's channels and the name of its file."""
    if variants.of_name(path.name):
        named = "Kontext, by its name: it is told its guidance"
    elif config.guidance_embeds:
        named = "dev: it is told its guidance"
    elif is_schnell(path, Choices(), None, guided=False):
        named = "schnell: without guidance; if it is a dev without, say --variant dev"
    else:
        named = "dev, by its name: it is not told its guidance"
    return f"type: {_INPUTS.get(config.in_channels, named)}"


def _layout(header: Header, part: str) -> str:
    """Return the part and the layout of its names."""
    kind = "GGUF, " if header.format == "GGUF" else ""
    if part == "vae":
        names = "ldm" if kl_vae_names.SIGN in header.tensors else "diffusers'"
        return f"{kind}a VAE for latents of {kl_vae.FLUX_1.latent_channels} channels, {names} names"
    layout, prefix = LAYOUTS.find(header.tensors) or (LAYOUTS.rows[0], "")
    return f"{kind}Flux.1's transformer, {layout.names}{f' behind {prefix}' if prefix else ''}"
