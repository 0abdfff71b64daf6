"""The kind of a file of weights and the option that takes it, by its header alone: its name says nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qwenimg.common.families.describe_lora import is_lora
from qwenimg.common.families.family import Family
from qwenimg.common.formats.stored import Header
from qwenimg.common.request.parts import PARTS

FLAGS = {
    "model": "-m",
    "transformer": "--transformer",
    "text_encoder": "--text-encoder",
    "vae": "--vae",
    "lora": "--lora",
}
"""The option that takes each kind of file."""
_NAMES = {"transformer": "transformer", "unet": "UNet", "text_encoder": "text encoder", "vae": "VAE"}


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A whole model, a part of one, or a LoRA: `option` is a key of FLAGS. A LoRA has no `family`."""

    option: str
    family: Family | None = None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return FLAGS[self.option]

    @property
    def is_part(self) -> bool:
        """True for a part of a model, which needs the other parts."""
        return self.option in PARTS

    @property
    def title(self) -> str:
        """The name of the kind, for a message."""
        if self.family is None:
            return "a LoRA"
        if not self.is_part:
            return f"a whole {self.family.title} model"
        part = self.family.denoiser if self.option == "transformer" else self.option
        return f"{self.family.title}'s {_NAMES.get(part, part)}"

    @property
    def needs(self) -> str:
        """The other files that an image needs, for a table."""
        if self.family is None:
            return "the model that it was made for"
        if not self.is_part:
            return ""
        others = [_NAMES[name] for group in self.family.components for name in group[:1]]
        part = _NAMES[self.family.denoiser if self.option == "transformer" else self.option]
        return ", ".join(name for name in others if name != part) if self.family.parts_alone else "a model (-m)"


def identify(header: Header, families: Iterable[Family]) -> FileKind | None:
    """Return the kind of the file with this header; None if it is no LoRA and none of `families` reads it."""
    if header.format == "safetensors" and is_lora(header):
        return FileKind(option="lora")
    matches = ((family, option) for family in families if (option := family.part(header)) is not None)
    return next((FileKind(option=option, family=family) for family, option in matches), None)


def listed_flags(parts: Iterable[str]) -> str:
    """Return the options of `parts`, each with the word for its file: `--text-encoder FILE and --vae FILE`."""
    return " and ".join(f"{FLAGS[part]} FILE" for part in parts)
