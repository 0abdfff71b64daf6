"""The description of a Flux.1 in one file, and the variant of its transformer."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Choices, Prediction
from qwenimg.common.families.description import Description, component_line, summary
from qwenimg.common.families.flux import single_file, variants
from qwenimg.common.families.flux.checkpoint import is_schnell
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.weights.plan import closed_on_failure

_INPUTS = {384: "Fill: it has a mask as an input", 128: "for control images, not supported"}


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe a model in one file: its layout, its parts and their faults. Return None for another file."""
    if not single_file.is_model(header):
        return None
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
    whole.lines.insert(1, f"type: {variant(path, opened['transformer'].config)}")
    for name, part in opened.items():
        part.plan.close()
        whole.lines.append(component_line(name, part.plan))
    if lacking := [name for name in ("text_encoder", "text_encoder_2", "vae") if name not in parts]:
        whole.lines.append(f"lacks: {', '.join(lacking)}; add them by --text-encoder and --vae, once for each")
    return whole


def variant(path: Path, config: FluxConfig) -> str:
    """Return the variant, by the transformer's channels and the name of its file."""
    if variants.of_name(path.name):
        named = "Kontext, by its name: it is told its guidance"
    elif config.guidance_embeds:
        named = "dev: it is told its guidance"
    elif is_schnell(path, Choices(), None, guided=False):
        named = "schnell: without guidance; if it is a dev without, say --variant dev"
    else:
        named = "dev, by its name: it is not told its guidance"
    return _INPUTS.get(config.in_channels, named)
