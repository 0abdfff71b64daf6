"""CLIP text encoders in the file of a model, or in a folder or file of their own: which one of a model it is.

SDXL has two text encoders of different widths, so the width of a file says which one it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.headers import peek
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.encoders.clip_names import LAYOUTS
from qwenimg.common.parts.components import config_at, is_absent, read_config
from qwenimg.common.parts.open_file import find, open_named, open_part
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD
from qwenimg.common.runtime.checkpoint import Checkpoint, Component


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text encoder in the file of a model: its folder in diffusers' layout, the start of its names, and the
    configuration of its type."""

    component: str
    prefix: str
    like: CLIPConfig
    converted: str = ""  # the prefix where stable-diffusion.cpp gave it transformers' names

    @property
    def pad(self) -> str:
        """The token that pads its prompts."""
        return OPEN_CLIP_PAD if self.like.hidden_act == clip.OPEN_CLIP_H.hidden_act else EOS_PAD

    def within(self, names: Collection[str]) -> Text | None:
        """Return this text encoder with the prefix that it has in `names`; None if it is not there."""
        if self.converted and any(name.startswith(f"{self.converted}text_model.encoder.") for name in names):
            return replace(self, prefix=self.converted)
        return self if any(name.startswith(self.prefix) for name in names) else None

    def open(self, header: Header, *, for_rewrite: bool = False) -> Component:
        """Open it in the open file, which the caller closes. Raises ModelError."""
        naming = find(header, LAYOUTS, self.component, self.prefix)
        return open_named(header, LAYOUTS, naming, of_type(self.like), self.component, for_rewrite=for_rewrite)


WIDTHS = {768: "CLIP-L (ViT-L/14)", 1024: "OpenCLIP-H", 1280: "CLIP-G (OpenCLIP bigG)"}
_NORMS = ("ln_final.weight", "text_model.final_layer_norm.weight", "final_layer_norm.weight")


def width_alone(tensors: Mapping[str, Stored]) -> int | None:
    """Return the width of a text encoder that is alone in its file; None for another file."""
    naming = LAYOUTS.find_alone(tensors)
    return None if naming is None else _width(tensors, naming.prefix)


def _width(tensors: Mapping[str, Stored], prefix: str) -> int:
    norm = next((tensors[prefix + name] for name in _NORMS if prefix + name in tensors), None)
    return norm.shape[0] if norm is not None and len(norm.shape) == 1 else 0


def title(header: Header) -> str:
    """Return the title of the text encoder in a file with this header."""
    width = width_alone(header.tensors) or 0
    return f"{WIDTHS.get(width, 'a CLIP text encoder')} (width {width})"


def of_type(config: CLIPConfig) -> CLIPConfig:
    """Return the type of `config` without its sizes, so that all of them are those of a file."""
    return replace(config, hidden_size=1, num_attention_heads=1)


def open_text(checkpoint: Checkpoint, path: Path) -> tuple[str, Component]:
    """Open the text encoder in the folder or file `path`. Return its name in the model, and itself. Raises
    ModelError."""
    name = name_of(path, {name: part.config.hidden_size for name, part in checkpoint.texts.items()}, checkpoint.source)
    own = checkpoint[name].config
    like = config_at(clip.NETWORK, path, of_type(own) if is_absent(checkpoint[name]) else own)
    return name, open_part(LAYOUTS, path, like, name)


def width_in(path: Path, prefix: str = "") -> int:
    """Return the width of the text encoder in a file, of that whose names start with `prefix`. Raises ModelError."""
    header = peek(path)
    return _width(header.tensors, find(header, LAYOUTS, "text encoder", prefix).prefix)


def name_of(path: Path, widths: Mapping[str, int], source: Path) -> str:
    """Return the name of the text encoder in the folder or file `path`, by the `widths` of those of the model in
    `source`. Raises ModelError."""
    width = read_config(clip.NETWORK, path).hidden_size if is_folder(path) else width_in(path)
    name = next((name for name, own in widths.items() if own == width), None)
    if name is None:
        known, title = " and ".join(map(str, widths.values())), WIDTHS.get(width, f"a text encoder of width {width}")
        raise ModelError(
            f"{clean(path, 120)}: is {title}; {clean(source.name, 60)} takes width {known} ({width} found)"
        )
    return name
