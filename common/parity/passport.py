"""A parity passport: what one model computed on one machine, block by block, so that another machine can do it again.

Beside what the recording backend gave stands what float64 gives for the same inputs and weights; every backend is held
against that. docs/measured/parity.md has the schema of the file, which `passport_file` reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.parity.sample import Drawn
from qwenimg.common.parity.stations import Station
from qwenimg.common.runtime.traced import Dtype, Values

MAX_GAIN = 128.0  # in bfloat16 the limit would be the whole update then, and nothing would be judged

# Of an argument: as a Tree, with what is to be drawn.
Given: TypeAlias = "Values | Drawn | Dtype | float | tuple[Given, ...] | None"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One array of a block's result: whole in float32, or where there is a `seed` projections of it in float64."""

    dtype: str
    shape: tuple[int, ...]
    values: NDArray[Any]
    seed: int | None = None
    exact: NDArray[np.float64] | None = None  # of the same; None where nothing here computes in float64
    gain: float = 1.0  # times a rounding of the block's arguments that its update changes by, at least 1


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """One call of a block."""

    component: str  # its name in the checkpoint
    block: str  # the name of the network's `Block`
    path: str  # of the module
    name: str  # of the call, with the component's name
    arguments: tuple[Given, ...]
    results: tuple[Kept, ...]
    operations: dict[str, int] = field(default_factory=dict)  # how many of each, by name and dtype of the result


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one backend's result of a block is worth: errors relative to float64, in units of roundoff."""

    error: float
    allowed: float
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend on a machine, and of each recorded block the figures of its results."""

    backend: str
    device: str
    versions: dict[str, str]
    tf32: bool
    figures: tuple[tuple[Figure, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which model, by name and by what its files have."""

    name: str
    family: str
    quantize: str
    fingerprints: dict[str, str]  # of each component, of its files
    shapes: dict[str, str]  # of each component, of the names and shapes of its parameters
    parts: dict[str, str] = field(default_factory=dict)  # the names of those that were given beside the model
    prediction: str = ""
    lora: str = ""  # names with strengths, as a recipe has them
    lora_fingerprints: list[str] = field(default_factory=list)  # of their files


@dataclass(frozen=True, kw_only=True)
class RecordedImage:
    """The run that was recorded, and what came of it."""

    asked: dict[str, Any]  # what the call asked for, its prompt included
    sigmas: tuple[float, ...]
    noise: str  # SHA-256 of the initial noise
    latents: NDArray[np.float32]
    pixels: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Passport:
    version: str  # of qwenimg
    created: str
    model: Model
    precision: str  # the policy's name
    places: dict[str, str]  # what each component and FP32 place is in
    picture: RecordedImage | None  # None of a trace of another program's
    blocks: tuple[Recorded, ...]
    sides: tuple[Side, ...] = field(default=())  # the first one recorded it
    run: tuple[Station, ...] = ()  # of the picture; none of a trace, and in files of the first versions
