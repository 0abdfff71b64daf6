"""A parity passport: the results of one model on one machine, block by block, so that another machine can repeat them.

Beside the recording backend's results are those of float64 for the same inputs and weights; every backend is judged
against these. docs/measured/parity.md has the schema of the file, which `passport_file` reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.parity.sample import Drawn
from qwenimg.common.parity.stations import Station
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.recipe import recorded_loras
from qwenimg.common.runtime.traced import Dtype, Values

MAX_GAIN = 128.0  # in bfloat16 the limit of a larger gain would exceed the update, and every result would pass

# An argument of a block: a Tree whose arrays may be descriptions of random ones.
Argument: TypeAlias = "Values | Drawn | Dtype | float | tuple[Argument, ...] | None"


@dataclass(frozen=True, kw_only=True)
class RecordedResult:
    """One array of a block's result: whole in float32, or with a `seed` its projections in float64."""

    dtype: str
    shape: tuple[int, ...]
    values: NDArray[Any]
    seed: int | None = None
    exact: NDArray[np.float64] | None = None  # the same in float64; None if no backend here computes in it
    gain: float = 1.0  # the change of the update per rounding of the block's arguments, at least 1


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One call of a block."""

    component: str  # its name in the checkpoint
    block: str  # the name of the network's `Block`
    path: str  # the path of the module
    name: str  # the name of the call, with the component's name
    arguments: tuple[Argument, ...]
    results: tuple[RecordedResult, ...]
    operations: dict[str, int] = field(default_factory=dict)  # their numbers, by name and dtype of the result


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The error of one backend's result of a block, relative to float64, in units of roundoff."""

    error: float
    allowed: float
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend on a machine, and the figures of its results for each recorded block."""

    backend: str
    device: str
    versions: dict[str, str]
    tf32: bool
    figures: tuple[tuple[Figure, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Model:
    """The identity of a model: its names, and the fingerprints of its files."""

    name: str
    family: str
    quantize: str
    fingerprints: dict[str, str]  # of each component's files
    shapes: dict[str, str]  # hash of the names and shapes of each component's parameters
    parts: dict[str, str] = field(default_factory=dict)  # names of the parts that were given beside the model
    prediction: str = ""
    lora: str = ""  # names with strengths, in a recipe's form
    lora_fingerprints: list[str] = field(default_factory=list)  # of their files

    @property
    def loras(self) -> tuple[Lora, ...]:
        return recorded_loras({"lora": self.lora})


@dataclass(frozen=True, kw_only=True)
class RecordedControl:
    """One control of a recorded run."""

    name: str  # of its network or LoRA, without folders
    fingerprint: str  # of its files
    preprocessor: str
    scale: float
    start: float
    end: float
    picture: NDArray[np.uint8]  # [H, W, 3] of the image's size, before the preprocessor


@dataclass(frozen=True, kw_only=True)
class RecordedImage:
    """The run that was recorded, and its image."""

    asked: dict[str, Any]  # the arguments of the call, with its prompt
    sigmas: tuple[float, ...]
    noise: str  # SHA-256 of the initial noise
    latents: NDArray[np.float32]
    pixels: NDArray[np.uint8]
    controls: tuple[RecordedControl, ...] = ()
    mask: NDArray[np.uint8] | None = None  # [H, W] of the picture that it belongs to


@dataclass(frozen=True, kw_only=True)
class Passport:
    version: str  # of qwenimg
    created: str
    model: Model
    precision: str  # the policy's name
    places: dict[str, str]  # the dtype of each component and FP32 place
    picture: RecordedImage | None  # None for a trace of another program
    blocks: tuple[Recorded, ...]
    sides: tuple[Side, ...] = field(default=())  # the first one recorded it
    run: tuple[Station, ...] = ()  # the image's stations; () for a trace, and in files of the first versions
