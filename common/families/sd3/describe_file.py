"""The description of a Stable Diffusion 3 model, or of a part of one, in one file."""

from __future__ import annotations

import re
from pathlib import Path

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, component_line, of_file
from qwenimg.common.families.sd3 import single_file
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.sd3_dit import SD3Config
from qwenimg.common.networks.denoisers.sd3_names import LAYOUTS
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.parts import vae_files
from qwenimg.common.parts.texts import clip_files, t5_files
from qwenimg.common.runtime.checkpoint import Component

CLIP_WIDTHS = (768, 1280)  # of CLIP-L and CLIP-G
_LACKS = "lacks: {}; add them by --vae and --text-encoder, once for each"
TURBO = "turbo"  # in the name of a distilled model, whose files do not show it
LARGE_LAYERS = 38
_BLOCK = re.compile(r"(?:joint|transformer)_blocks\.(\d{1,4})\.")


def reads(header: Header) -> bool:
    """Return whether a file with this header has a transformer with its authors' names."""
    return bool(single_file.parts_of(header))


def part_of(header: Header) -> str | None:
    """Return `model` for a model in one file, else the part in it; None for another file."""
    if parts := single_file.parts_of(header):
        return "model" if "vae" in parts else "transformer"
    if LAYOUTS.find_in(header) is not None:
        return "transformer"
    if t5_files.is_alone(header) or clip_files.width_alone(header.tensors) in CLIP_WIDTHS:
        return "text_encoder"
    return "vae" if vae_files.latent_channels(header.tensors) == kl_vae.STABLE_DIFFUSION_3.latent_channels else None


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of, by its layers, and for
    the distilled one by its name. Raises ModelError."""
    names = [key for file in find_files(transformer).files for key in peek(file).tensors]
    count = len({match[1] for key in names if (match := _BLOCK.search(key))})
    if count == LARGE_LAYERS:
        return f"sd3.5-large{'-turbo' if TURBO in display_name(transformer).lower() else ''}"
    return "sd3.5-medium" if any(".attn2." in key for key in names) else "sd3-medium"


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the file: its variant, its parts, and its faults. Return None for another file."""
    parts = single_file.parts_of(header)
    if not parts:
        return None
    form = "GGUF, " if header.format == "GGUF" else ""
    layout = f"{form}Stable Diffusion 3, single file"
    result = of_file(layout, header, lambda name: name.endswith("pos_embed"))
    try:
        components = single_file.open_file(header.file.path)
    except ModelError as error:
        result.faults.append(str(error))
        return result
    result.lines.insert(1, f"type: {_variant(components['transformer'])}")
    for name, part in components.items():
        part.plan.close()
        result.lines.append(component_line(name, part.plan))
    lacking = [name for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae") if name not in parts]
    if lacking:
        result.lines.append(_LACKS.format(", ".join(lacking)))
    return result


def _variant(transformer: Component) -> str:
    """Return the variant, which the layers show."""
    config: SD3Config = transformer.config
    kind = "3" if config.qk_norm is None else "3.5 medium" if config.dual_attention_layers else "3.5 large"
    second = f", {len(config.dual_attention_layers)} with a second attention" if config.dual_attention_layers else ""
    return f"Stable Diffusion {kind}, {counted(config.num_layers, 'layer')}{second}"
