"""The user's choices of a model's weights, which its family reads to open it. Imports nothing that computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from qwenimg.common.base.arguments import shown
from qwenimg.common.base.errors import UsageError
from qwenimg.common.request.parts import PARTS, components_of

Prediction = Literal["eps", "v", "x0"]
"""The prediction of a UNet: the noise, the velocity, or the image."""
PREDICTIONS: tuple[str, ...] = get_args(Prediction)


def check_prediction(value: object) -> None:
    """Check a value of --prediction. Raises UsageError."""
    if not (isinstance(value, str) and value in PREDICTIONS):
        raise UsageError(f"prediction is {shown(value)}; choose one of {', '.join(PREDICTIONS)}")


VARIANTS = ("text", "edit", "2509", "2511", "layered", "kontext", "dev", "schnell")
"""The models whose weights, or whose names, do not tell them apart: text to image, Qwen-Image-Edit, -2509, -2511 and
-Layered, FLUX.1 Kontext, dev and schnell."""


def check_variant(value: object) -> None:
    """Check a value of --variant. Raises UsageError."""
    if not (isinstance(value, str) and value in VARIANTS):
        raise UsageError(f"variant is {shown(value)}; choose one of {', '.join(VARIANTS)}")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The part of an `Opening` that a family reads. None: as the model's files say."""

    prediction: Prediction | None = None  # of the UNet
    parts: Mapping[str, Path] = field(default_factory=dict)  # {part, of PARTS: the folder or file of its weights}
    variant: str | None = None  # the model of those whose files do not tell them apart
    tokenizer: Path | None = None  # the folder of a tokenizer, for a single file, which has none
    quantize: str | None = None  # how weights are quantized: `weights/quantize.py`
    whole: bool = False  # every tensor as it is stored, to be written again and not to generate images
    tokenizer_of_base: Path | None = None  # another folder of a tokenizer: of the model that a refiner refines

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown prediction or variant."""
        if self.prediction is not None:
            check_prediction(self.prediction)
        if self.variant is not None:
            check_variant(self.variant)

    def made(self) -> list[str]:
        """Return the names of the user's choices."""
        given = {
            name for name in ("prediction", "variant", "tokenizer") if getattr(self, name) is not None
        } | self.parts.keys()
        return [name for name in ("prediction", "variant", "tokenizer", *PARTS) if name in given]

    @property
    def elsewhere(self) -> frozenset[str]:
        """The components whose weights are not the model's own, and `tokenizer` if one is given."""
        given = components_of(self.parts)
        return given if self.tokenizer is None else given | {"tokenizer"}

    def variant_of(self, known: Collection[str], title: str) -> str | None:
        """Return the variant, one of the `known` ones of the models `title`; None if none was chosen. Raises
        UsageError."""
        if self.variant is not None and self.variant not in known:
            raise UsageError(f"--variant {self.variant} is no {title}; choose one of {', '.join(known)}")
        return self.variant

    def part(self, name: str) -> Path | None:
        """Return the folder or file that was chosen for one of PARTS."""
        return self.parts.get(name)
