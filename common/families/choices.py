"""What may be chosen when a model is opened. Names a model's parts; imports nothing that computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from qwenimg.common.base.arguments import shown
from qwenimg.common.base.errors import UsageError

Prediction = Literal["eps", "v", "x0"]
"""What a UNet gives: the noise, the velocity, or the image."""


PARTS = ("transformer", "text_encoder", "text_encoder_2", "vae")
"""The parts of a model whose weights may be another folder's or file's, as the options call them."""


def components_of(parts: Iterable[str]) -> frozenset[str]:
    """The components that `parts`, of PARTS, are in some family, by the names of their folders."""
    return frozenset(name for part in parts for name in (("transformer", "unet") if part == "transformer" else (part,)))


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What may be chosen when a model is opened. None is what its files say."""

    prediction: Prediction | None = None  # of the UNet
    transformer: Path | None = None  # the denoiser's weights in another folder or file
    text_encoder: Path | None = None  # those of the text encoder, or of one of two
    text_encoder_2: Path | None = None  # those of the other
    vae: Path | None = None
    tokenizer: Path | None = None  # the folder of that for a single file, which has none
    quantize: str | None = None  # how weights are kept in codes: `weights/quantise.py`
    whole: bool = False  # every tensor as it is stored, to be written again and not to draw
    tokenizer_of_base: Path | None = None  # where else one may be: that of the model which a refiner refines

    def __post_init__(self) -> None:
        """Raise UsageError for a prediction that is none."""
        known = get_args(Prediction)
        if self.prediction is not None and not (isinstance(self.prediction, str) and self.prediction in known):
            raise UsageError(f"prediction is {shown(self.prediction)}; choose one of {', '.join(known)}")

    def made(self) -> list[str]:
        """The names of the user's choices that are not None."""
        return [name for name in ("prediction", "tokenizer", *PARTS) if getattr(self, name) is not None]

    @property
    def elsewhere(self) -> frozenset[str]:
        """The components whose weights are not the model's own, and `tokenizer` where one is given."""
        given = components_of(part for part in PARTS if self.part(part) is not None)
        return given if self.tokenizer is None else given | {"tokenizer"}

    def part(self, name: str) -> Path | None:
        """Of one of PARTS the folder or file that was chosen."""
        found: Path | None = getattr(self, name)
        return found
