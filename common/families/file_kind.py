"""What a file of weights is and which option it goes with, by its header alone: its name says nothing."""

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
"""Of each kind of file the option that takes it."""
_NAMES = {"transformer": "transformer", "unet": "UNet", "text_encoder": "text encoder", "vae": "VAE"}


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A whole model, a part of one, or a LoRA: `option` is a key of FLAGS. Of a LoRA `family` is None."""

    option: str
    family: Family | None = None

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return FLAGS[self.option]

    @property
    def is_part(self) -> bool:
        """Whether the other parts of a model are needed beside it."""
        return self.option in PARTS

    @property
    def title(self) -> str:
        """What it is, for a message."""
        if self.family is None:
            return "a LoRA"
        if not self.is_part:
            return f"a whole {self.family.title} model"
        part = self.family.denoiser if self.option == "transformer" else self.option
        return f"{self.family.title}'s {_NAMES.get(part, part)}"

    @property
    def needs(self) -> str:
        """What drawing takes besides, for a table."""
        if self.family is None:
            return "the model that it was made for"
        if not self.is_part:
            return ""
        others = [_NAMES[name] for group in self.family.components for name in group[:1]]
        own = _NAMES[self.family.denoiser if self.option == "transformer" else self.option]
        return ", ".join(name for name in others if name != own) if self.family.parts_alone else "a model (-m)"


def identify(header: Header, families: Iterable[Family]) -> FileKind | None:
    """Return what a file with this header is; None for what none of `families` reads."""
    if header.format == "safetensors" and is_lora(header):
        return FileKind(option="lora")
    found = ((family, option) for family in families if (option := family.part(header)) is not None)
    return next((FileKind(option=option, family=family) for family, option in found), None)


def listed_flags(parts: Iterable[str]) -> str:
    """Return the options of `parts`, each with the word for its file: `--text-encoder FILE and --vae FILE`."""
    return " and ".join(f"{FLAGS[part]} FILE" for part in parts)
