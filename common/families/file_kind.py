"""The kind of a file of weights and the option that takes it, by its header alone: its name says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwenimg.common.families.family import Family
from qwenimg.common.formats.stored import Header
from qwenimg.common.request.parts import PARTS

_LORA_KEY = re.compile(r".*(\.lora_|[._]lora\d?\.|\.hada_w|\.lokr_|\.oft_|\.lora_linear_layer\.|lora_controlnet).*")
FLAGS = {
    "model": "-m",
    "transformer": "--transformer",
    "text_encoder": "--text-encoder",
    "vae": "--vae",
    "effnet": "--effnet",
    "lora": "--lora",
    "control": "--control",
    "ip_adapter": "--ip-adapter",
    "ip_encoder": "--ip-encoder",
}
"""The option that takes each kind of file. A file of several kinds is of the first."""
_NAMES = {
    "control": "control network",
    "ip_adapter": "IP-Adapter",
    "ip_encoder": "image encoder",
    "transformer": "transformer",
    "unet": "UNet",
    "text_encoder": "text encoder",
    "vae": "VAE",
    "effnet": "encoder of pictures",
}


def is_lora(header: Header) -> bool:
    """Return whether a file with this header is a LoRA."""
    is_control = "lora_controlnet" in header.tensors  # a Control-LoRA, whose matrices have factors too
    return not is_control and any(_LORA_KEY.fullmatch(key) for key in header.tensors)


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """The kind of a file: a whole model, a part of one, a control network, or a LoRA. `option` is a key of FLAGS.
    `families`: those whose models have such a part, several for a text encoder that they share; none for a LoRA."""

    option: str
    families: tuple[Family, ...] = ()

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
        if not self.families:
            return "a LoRA"
        if self.option == "model":
            return f"a whole {self.models} model"
        return f"{self.models}'s {self._part}" if len(self.families) == 1 else f"a {self._part} of {self.models}"

    @property
    def models(self) -> str:
        """The names of the families."""
        return listed_titles(self.families)

    @property
    def parts_alone(self) -> bool:
        """True for a part of models that need no folder: their configurations ship."""
        return bool(self.families) and all(family.model_of is not None for family in self.families)

    @property
    def _part(self) -> str:
        """The name of the part."""
        part = self.families[0].denoiser if self.option == "transformer" else self.option
        return _NAMES.get(part, part)

    @property
    def needs(self) -> str:
        """The other files that an image needs, for a table."""
        if not self.families:
            return "the model that it was made for"
        if not self.is_part:
            pictures = {"control": "a picture", "ip_adapter": "an --ip-image", "ip_encoder": "an --ip-adapter"}
            return f"a model (-m) and {pictures[self.option]}" if self.option in pictures else ""
        others = ("transformer", "text_encoder", "vae") if self.parts_alone else ()
        return ", ".join(_NAMES[name] for name in others if name != self.option) or "a model (-m)"


def identify(header: Header, families: Iterable[Family]) -> FileKind | None:
    """Return the kind of the file with this header; None if it is no LoRA and none of `families` reads it."""
    if header.format == "safetensors" and is_lora(header):
        return FileKind(option="lora")
    claims = [(family, option) for family in families if (option := family.option(header)) is not None]
    option = min((option for _, option in claims), key=list(FLAGS).index, default=None)
    if option is None:
        return None
    return FileKind(option=option, families=tuple(family for family, claimed in claims if claimed == option))


def listed_flags(parts: Iterable[str]) -> str:
    """Return the options of `parts`, each with the word for its file: `--text-encoder FILE and --vae FILE`."""
    return " and ".join(f"{FLAGS[part]} FILE" for part in parts)


def listed_titles(families: Sequence[Family]) -> str:
    """Return the names of `families`, for a message."""
    *others, last = (family.title for family in families)
    return f"{', '.join(others)} and {last}" if others else last
