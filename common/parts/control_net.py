"""The controllers of a request, in every family: a network of its own, a LoRA of the denoiser, the denoiser itself, an
IP-Adapter or a Redux."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.base.text import clean
from qwenimg.common.runtime.checkpoint import Component

REDUX_PARTS = ("tokens", "pooled")  # the parts of a text with pictures that have scales of their own


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlNet:
    """A network by which a picture controls a denoiser. Its plan holds the files open."""

    name: str  # of its component in memory, and in messages: no other network of the model has it
    component: Component
    mask: Literal["none", "optional", "needed"] = "none"  # whether it takes a mask of its picture
    # Whether the mask is not of its picture and of a second one, which it sees too: the picture to start from
    fills: bool = False
    # What it sees of its picture: latents, or pixels from 0 to 1 with their channels in this order, or in grey
    picture: Literal["latents", "rgb", "bgr", "grey"] = "latents"
    multiple: int = 1  # of pixels, that the sides of its picture are
    samples: bool = False  # whether the picture becomes a sample of its latents; else it becomes their mean
    kinds: tuple[str, ...] = ()  # of pictures, of a network for several, which needs one with each
    prompt: ClassVar[str] = ""  # it expects no start of its prompts

    @property
    def files(self) -> Iterable[OpenFile]:
        return self.component.plan.files

    def quantized(self, text: str) -> ControlNet:
        """Return the network with its weights quantized by `text`. Raises UsageError."""
        return replace(self, component=self.component.quantized(text))

    def close(self) -> None:
        self.component.plan.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlLora:
    """A LoRA with which a denoiser keeps to a picture that it sees itself: as further tokens or channels. Its file
    is open; without one it is on paper."""

    name: str
    file: OpenFile | None
    prompt: str = ""  # the start of the prompts that it was trained with
    samples: bool = False  # whether the picture becomes a sample of its latents; else it becomes their mean
    mask: ClassVar[Literal["none"]] = "none"
    fills: ClassVar[bool] = False
    picture: ClassVar[Literal["latents"]] = "latents"
    multiple: ClassVar[int] = 1
    kinds: ClassVar[tuple[str, ...]] = ()

    @property
    def files(self) -> Iterable[OpenFile]:
        return () if self.file is None else (self.file,)

    @property
    def path(self) -> Path | None:
        return None if self.file is None else self.file.path

    def quantized(self, text: str) -> ControlLora:
        """Return the LoRA unchanged: it has no weights of its own in memory."""
        return self

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnInput:
    """A denoiser that was trained to keep to a picture, which it sees as a sample of its latents: the network of such a
    control is the model itself, whose name in requests is empty."""

    name: str = ""
    files: ClassVar[tuple[OpenFile, ...]] = ()
    mask: ClassVar[Literal["none"]] = "none"
    fills: ClassVar[bool] = False
    picture: ClassVar[Literal["latents"]] = "latents"
    multiple: ClassVar[int] = 1
    samples: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ()
    prompt: ClassVar[str] = ""

    def quantized(self, text: str) -> OwnInput:
        """Return it unchanged."""
        return self

    def close(self) -> None:
        """Do nothing: the model has no files beside its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureAdapter(ABC):
    """A network by which pictures are prompts, and the encoder of its pictures. Their plans hold the files open."""

    name: str
    component: Component
    encoder: Component | None  # None: not found yet
    mask: ClassVar[Literal["none"]] = "none"
    picture: ClassVar[Literal["whole", "text"]] = "whole"
    kinds: ClassVar[tuple[str, ...]] = ()
    fills: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    prompt: ClassVar[str] = ""

    @property
    def files(self) -> Iterable[OpenFile]:
        encoder = () if self.encoder is None else self.encoder.plan.files
        return (*self.component.plan.files, *encoder)

    @property
    def path(self) -> Path:
        return next(file.path for file in self.component.plan.files)

    @abstractmethod
    def scales(self, scale: float, parts: Sequence[tuple[str, float]]) -> Sequence[float]:
        """Return the scales at which it takes a picture: from one `scale`, or from those of `parts`. Raises
        UsageError."""

    def quantized(self, text: str) -> Self:
        """Return it unchanged: it is computed once for an image."""
        return self

    def close(self) -> None:
        self.component.plan.close()
        if self.encoder is not None:
            self.encoder.plan.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class IPAdapter(PictureAdapter):
    """An adapter whose pictures are seen beside the text, by the cross attentions of a UNet."""

    attentions: tuple[str, ...]  # the paths of the UNet's cross attentions, in their order
    named: Mapping[str, tuple[str, ...]]  # the blocks of the UNet by the names of what they lead

    def scales(self, scale: float, parts: Sequence[tuple[str, float]]) -> list[float]:
        """Return the scale of each cross attention: `scale`, or those of `parts`, names or paths of blocks, and 0 in
        the others. Raises UsageError."""
        scales = [0.0 if parts else scale for _ in self.attentions]
        for part, own in parts:
            blocks = self.named.get(part, (part,))
            inside = [
                i for i, path in enumerate(self.attentions) if any(f"{path}.".startswith(f"{b}.") for b in blocks)
            ]
            if not inside:
                raise UsageError(
                    f"{clean(part, 60)} is no part of this model with a cross attention; choose "
                    f"{', '.join(self.named)}, or a block such as {self.attentions[-1]}"
                )
            for i in inside:
                scales[i] = own
        return scales


@dataclass(frozen=True, kw_only=True, eq=False)
class Redux(PictureAdapter):
    """An adapter that makes tokens of its pictures, which follow those of the text."""

    picture: ClassVar[Literal["text"]] = "text"

    def scales(self, scale: float, parts: Sequence[tuple[str, float]]) -> tuple[float, float]:
        """Return the scale of the tokens, the text's too, and that of the pooled text, 1 unless `parts` has it. Raises
        UsageError."""
        named = dict(parts)
        if unknown := sorted(named.keys() - {*REDUX_PARTS}):
            known = " and ".join(REDUX_PARTS)
            raise UsageError(f"{clean(unknown[0], 60)} is no part of a text with pictures; its parts are {known}")
        tokens, pooled = REDUX_PARTS
        return named.get(tokens, scale), named.get(pooled, 1.0)


class Encoders(NamedTuple):
    """The image encoders that an adapter may take: folders or files."""

    paths: Iterable[Path]
    given: bool  # by the user, so that no other is looked for


Controller: TypeAlias = ControlNet | ControlLora | OwnInput | PictureAdapter


def networks(controllers: Iterable[Controller]) -> list[ControlNet]:
    """Return the networks among `controllers`, without LoRAs."""
    return [one for one in controllers if isinstance(one, ControlNet)]


def is_seen(controller: Controller) -> bool:
    """Return whether the denoiser itself sees the picture of a controller."""
    return isinstance(controller, (ControlLora, OwnInput))


def check_sizes(path: Path, denoiser: str, sizes: Mapping[str, tuple[object, object]]) -> None:
    """Raise ModelError for the control network at `path` if it was made for another `denoiser`: one of its sizes, by
    their names, differs from the model's."""
    for what, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise ModelError(
                f"{clean(path)}: is made for a {denoiser} with {_told(ours)} {what}; the model's has {_told(theirs)}"
            )


def _told(size: object) -> str:
    return ", ".join(map(str, size)) if isinstance(size, tuple) else "no" if size is None else str(size)
