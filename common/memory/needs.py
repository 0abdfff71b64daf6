"""The stages of a picture and the bytes that each takes, on a machine with so much room, from configurations alone.

What one stage leaves in memory stays for the next where both fit, and is freed where they do not: the same rule by
which models load and free their components.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Bytes over what the framework takes when idle."""

    name: str  # encode, text, modulation, denoise, refine or decode
    title: str  # of what takes them, for messages: `the transformer`
    weights: int  # in memory while it runs, also of what stays from stages before
    activations: int
    about: str = ""  # how it is made to fit: `in tiles of 512 pixels`

    @property
    def peak(self) -> int:
        return self.weights + self.activations

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "weights_bytes": self.weights,
            "activation_bytes": self.activations,
            "peak_bytes": self.peak,
        }


@dataclass(kw_only=True)
class Needs:
    """What a picture takes, its stages in their order on `room` bytes.

    `loaded`: bytes by component of what is in memory already; `freed`: the components that make room for others;
    `steps` and `decoding`: multiplications and additions; `streamed`: bytes of blocks that all steps read anew."""

    room: int
    loaded: Mapping[str, int]
    freed: Collection[str]
    stages: list[Stage] = field(default_factory=list)
    steps: float = 0.0
    decoding: float = 0.0
    streamed: float = 0.0

    def __post_init__(self) -> None:
        self.kept = dict(self.loaded)  # bytes by component of what is in memory behind the last stage

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.peak)

    def fits(self, room: int) -> bool:
        """In so many bytes, those of what is loaded already among them."""
        return self.largest.peak <= room

    def add(
        self,
        name: str,
        title: str,
        weights: Mapping[str, int],
        activations: int,
        *,
        stays: bool = False,
        about: str = "",
    ) -> None:
        """A stage that needs the components `weights`; `stays`: whether they are kept after it."""
        self.make_room(weights, activations)
        self.kept |= weights
        held = sum(self.kept.values())
        self.stages.append(Stage(name=name, title=title, weights=held, activations=activations, about=about))
        if not stays:
            for component in weights:
                del self.kept[component]

    def make_room(self, weights: Mapping[str, int], activations: int) -> None:
        """Frees what is not needed where it does not all fit."""
        if self.left(weights) < activations:
            self.kept = {n: size for n, size in self.kept.items() if n in weights or n not in self.freed}

    def left(self, weights: Mapping[str, int]) -> int:
        """Bytes beside what is kept and `weights`; below zero where those do not fit."""
        return self.room - sum((self.kept | dict(weights)).values())
