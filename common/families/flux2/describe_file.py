"""The description of one part of FLUX.2 in a file of its own, which has no configuration."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.choices import Prediction
from qwenimg.common.families.description import Description, of_file
from qwenimg.common.families.flux2.checkpoint import LAYOUTS, model_of
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.parts.open_file import open_part

_AUTHORS = ", in its authors' names"
_USES = {
    "transformer": "use it: qwenimg PROMPT --transformer FILE --text-encoder FILE --vae FILE",
    "vae": "use it: qwenimg PROMPT -m MODEL --vae FILE",
}


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header; None for another file."""
    if LAYOUTS["transformer"].find_in(header) is not None:
        return "transformer"
    if LAYOUTS["vae"].find(header.tensors) is not None:
        return "vae"
    is_text = gguf.may_be(header, qwen3.NETWORK.architectures) and qwen3.is_in(header.tensors)
    return "text_encoder" if is_text else None


def describe_file(header: Header, prediction: Prediction | None) -> Description | None:
    """Describe the part in a file: its layout, its weights, and the faults of a transformer or VAE. Return None for
    another file."""
    part, path = part_of(header), header.file.path
    if part is None:
        return None
    whole = of_file(_layout(header, part), header, lambda key: "embd" in key)
    if part == "text_encoder":
        whole.lines.append("use it: qwenimg PROMPT -m MODEL --text-encoder FILE")
        return whole
    try:
        opened = open_part(LAYOUTS[part], path, LAYOUTS[part].network.config(), part)
        opened.plan.close()
    except ModelError as error:
        whole.faults.append(str(error))
        return whole
    if part == "transformer":
        whole.lines.insert(1, f"type: {_type(path, opened.config)}")
    whole.lines.append(_USES[part])
    return whole


def _type(path: Path, config: Flux2Config) -> str:
    """Return the published model that is nearest to a transformer."""
    if config.guidance_embeds:
        return "FLUX.2 dev, which is not supported: it is told its guidance"
    return f"{model_of(path)}, by its width and its file's name"


def _layout(header: Header, part: str) -> str:
    """Return the part and the layout of its names."""
    kind = "GGUF, " if header.format == "GGUF" else ""
    if part == "text_encoder":
        return f"{kind}Qwen3, a text encoder"
    naming = LAYOUTS[part].find(header.tensors)
    authors = part == "transformer" and naming is not None and naming.layout.place is not None
    return f"{kind}FLUX.2's {part}{_AUTHORS if authors else ''}"
