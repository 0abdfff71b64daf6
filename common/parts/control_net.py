"""The controllers of a request, in every family: a network of its own, or a LoRA of the denoiser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.base.text import clean
from qwenimg.common.runtime.checkpoint import Component


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlNet:
    """A network by which a picture controls a denoiser. Its plan holds the files open."""

    name: str  # of its component in memory, and in messages: no other network of the model has it
    component: Component
    mask: Literal["none", "optional", "needed"] = "none"  # whether it takes a mask of its picture
    # Whether the mask is not of its picture and of a second one, which it sees too: the picture to start from
    fills: bool = False
    # What it sees of its picture: latents, or pixels from 0 to 1 with their channels in this order
    picture: Literal["latents", "rgb", "bgr"] = "latents"
    samples: bool = False  # whether the picture becomes a sample of its latents; else it becomes their mean
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
    """A LoRA with which a denoiser keeps to a picture that it sees as further tokens. Its file
    is open; without one it is on paper."""

    name: str
    file: OpenFile | None
    prompt: str  # the start of the prompts that it was trained with
    mask: ClassVar[Literal["none"]] = "none"
    fills: ClassVar[bool] = False
    picture: ClassVar[Literal["latents"]] = "latents"
    samples: ClassVar[bool] = False

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


Controller: TypeAlias = ControlNet | ControlLora


def networks(controllers: Iterable[Controller]) -> list[ControlNet]:
    """Return the networks among `controllers`, without LoRAs."""
    return [one for one in controllers if isinstance(one, ControlNet)]


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
