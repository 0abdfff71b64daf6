"""The JSON of a passport, key by key: the types and bounds that a file is checked for before its values are used.

A new key is a field here, with a default for older files that lack it. Names in a passport are looked up like those of
an image's recipe: no field opens a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

from qwenimg.common.base.text import clean
from qwenimg.common.families import registry
from qwenimg.common.parity.passport.passport import MAX_GAIN
from qwenimg.common.parity.sample import called
from qwenimg.common.parity.stations import FARTHEST
from qwenimg.common.precision import precision
from qwenimg.common.prompts.check import check_said
from qwenimg.common.request import control_text
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.recipe import recorded_loras
from qwenimg.common.request.request import Request
from qwenimg.common.weights import quantise

MAX_DRAWN = 1 << 24  # values of one random array
MAX_BLOCKS = 10_000
MAX_RANK = 8
MAX_ARRAYS = 8  # inputs or outputs of a station
MAX_NAME = 200  # characters
FLOATS = ("float32", "float16", "bfloat16")
PREDICTIONS = ("", "eps", "v", "x0")
LARGEST = 3e38  # the largest number: float32 holds it

_COUNT = {"min": 0, "max": 2**53}
_SIDE = {"min": 1, "max": 2**31 - 1}
_AXIS = {"min": -MAX_RANK, "max": MAX_RANK - 1}
_SEED = {"min": 0, "max": 2**32 - 1}
_NUMBER = {"min": -LARGEST, "max": LARGEST}
_SIZE = {"min": 0, "max": LARGEST}
_GAIN = {"min": 1, "max": MAX_GAIN}
_OWN = {"min": 0, "max": FARTHEST}
_SCALE = {"min": 0, "max": control_text.MAX_SCALE}
_SHARE = {"min": 0, "max": 1}


# An argument of a block is null, true or false, a number, a list of arguments, or one of these.


@dataclass(frozen=True, kw_only=True)
class NamedJson:
    named: str

    def __post_init__(self) -> None:
        if self.named not in FLOATS:
            raise ValueError(f"{clean(self.named, 30)!r} is none of {', '.join(FLOATS)}")


@dataclass(frozen=True, kw_only=True)
class ArrayJson:
    array: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class RecipeOfArray:
    dtype: str
    shape: tuple[int, ...] = field(metadata=_SIDE)
    seed: int = field(metadata=_SEED)
    axis: int = field(metadata=_AXIS)
    rms: float = field(metadata=_SIZE)
    channels: tuple[tuple[int, float, float], ...] = field(metadata=_NUMBER)

    def __post_init__(self) -> None:
        rank, values = len(self.shape), prod(self.shape)
        if self.dtype not in FLOATS:
            raise ValueError(f"{clean(self.dtype, 30)!r} is drawn, which is none of {', '.join(FLOATS)}")
        if not 16 <= values <= MAX_DRAWN or not 1 <= rank <= MAX_RANK:
            raise ValueError(
                f"an array of shape {clean(list(self.shape), 60)} is drawn; it has 16 to {MAX_DRAWN} values"
            )
        if not -rank <= self.axis < rank:
            raise ValueError(f"axis {self.axis} is not in the shape {list(self.shape)}")
        if not all(0 <= channel < self.shape[self.axis] for channel, _, _ in self.channels):
            raise ValueError(f"a channel is not in axis {self.axis} of the shape {list(self.shape)}")


@dataclass(frozen=True, kw_only=True)
class DrawnJson:
    drawn: RecipeOfArray


ARGUMENTS: dict[str, Any] = {"named": NamedJson, "array": ArrayJson, "drawn": DrawnJson}
"""The class of an argument that is an object, by its key."""


@dataclass(frozen=True, kw_only=True)
class ResultJson:
    dtype: str
    shape: tuple[int, ...] = field(metadata=_SIDE)
    seed: int | None = field(metadata=_SEED)
    gain: float = field(metadata=_GAIN)
    lacks: str | None
    values: str

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS:
            raise ValueError(f"a result is {clean(self.dtype, 30)!r}, which is none of {', '.join(FLOATS)}")


@dataclass(frozen=True, kw_only=True)
class BlockJson:
    component: str
    block: str
    path: str
    name: str
    arguments: tuple[object, ...]
    results: tuple[ResultJson, ...]
    operations: dict[str, int] = field(metadata=_COUNT)

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError(f"block {clean(self.name, 60)} has no result")


@dataclass(frozen=True, kw_only=True)
class ModelJson:
    name: str
    family: str
    quantize: str
    fingerprints: dict[str, str]
    shapes: dict[str, str]
    parts: dict[str, str] = field(default_factory=dict)
    prediction: str = ""
    lora: str = ""
    lora_fingerprints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.quantize:
            quantise.parse(self.quantize)
        if self.prediction not in PREDICTIONS:
            raise ValueError(f"the prediction {clean(self.prediction, 30)!r} is none of eps, v, x0")
        if unknown := self.parts.keys() - set(PARTS):
            raise ValueError(f"{clean(min(unknown), 30)!r} is none of the parts {', '.join(PARTS)}")
        if len(recorded_loras({"lora": self.lora})) != len(self.lora_fingerprints):
            raise ValueError("the LoRAs and their fingerprints are not of one number")


@dataclass(frozen=True, kw_only=True)
class AskedJson:
    """The arguments of the recorded call, without LoRAs, controls and mask, which are files. `pictures`: how many of
    those in `sample.SEEN` the model sees or the mask belongs to; `strength`: that of a mask."""

    prompt: str
    width: int = field(metadata=_COUNT)
    height: int = field(metadata=_COUNT)
    steps: int = field(metadata=_COUNT)
    seed: int | None = field(default=None, metadata={"min": 0, "max": 2**64 - 1})
    negative_prompt: str | None = None
    guidance: float | None = None
    true_cfg: float | None = None
    strength: float | None = None
    lora_mode: str | None = None
    pictures: int | None = field(default=None, metadata={"min": 1, "max": 2})

    def __post_init__(self) -> None:
        asked = called(self.said())
        Request(**asked | {"image": tuple(asked["image"])} if self.pictures else asked)
        check_said(self.prompt)

    def said(self) -> dict[str, Any]:
        """Return the keywords of the call, as `called` takes them."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ControlJson:
    """A control of the recorded call: its network by name and fingerprint, its numbers, and the tensor `picture`."""

    name: str
    fingerprint: str
    preprocessor: str
    scale: float = field(metadata=_SCALE)
    start: float = field(metadata=_SHARE)
    end: float = field(metadata=_SHARE)
    picture: str

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME:
            raise ValueError(f"a control called {clean(self.name, 30)!r}")
        if re.fullmatch("[0-9a-f]{64}", self.fingerprint) is None:
            raise ValueError(f"control {clean(self.name, 30)!r} has the fingerprint {clean(self.fingerprint, 30)!r}")
        if self.preprocessor not in ("", *control_text.PREPROCESSORS):
            raise ValueError(f"the preprocessor {clean(self.preprocessor, 30)!r} is not one of this version")
        if self.start > self.end:
            raise ValueError(f"control {clean(self.name, 30)!r} starts at {self.start:g}, behind its end")


@dataclass(frozen=True, kw_only=True)
class PictureJson:
    asked: AskedJson
    sigmas: tuple[float, ...] = field(metadata=_SIZE)
    noise: str
    latents: str
    pixels: str
    controls: tuple[ControlJson, ...] = ()
    mask: str | None = None

    def __post_init__(self) -> None:
        if len(self.controls) > control_text.MOST:
            raise ValueError(f"{len(self.controls)} controls; at most {control_text.MOST} are taken")


@dataclass(frozen=True, kw_only=True)
class FigureJson:
    """The figures of a result. An error is null if it could not be computed."""

    error: float | None = field(metadata=_SIZE)
    allowed: float | None = field(metadata=_SIZE)
    failures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SideJson:
    backend: str
    device: str
    versions: dict[str, str]
    tf32: bool
    figures: tuple[tuple[FigureJson, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StationJson:
    """A station of the run: names of its input and output tensors, and `own`, the policy's error, or null."""

    name: str
    given: tuple[str, ...]
    made: tuple[str, ...]
    own: float | None = field(metadata=_OWN)

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME:
            raise ValueError(f"a station called {clean(self.name, 30)!r}")
        if max(len(self.given), len(self.made)) > MAX_ARRAYS:
            raise ValueError(f"station {clean(self.name, 30)!r} has more than {MAX_ARRAYS} arrays")


@dataclass(frozen=True, kw_only=True)
class PassportJson:
    version: str
    created: str
    model: ModelJson
    precision: str
    places: dict[str, str]
    picture: PictureJson | None
    blocks: tuple[BlockJson, ...]
    sides: tuple[SideJson, ...]
    run: tuple[StationJson, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= MAX_BLOCKS or not self.sides:
            raise ValueError(
                f"{len(self.blocks)} blocks on {len(self.sides)} sides; there are 1 to {MAX_BLOCKS}, on one"
            )
        kinds = {family.name: family.precision for family in registry.FAMILIES}
        if self.model.family not in kinds:
            raise ValueError(f"the family {clean(self.model.family, 30)!r} is none of {', '.join(kinds)}")
        policy = precision.parse(self.precision, on_gpu=False, kind=kinds[self.model.family])
        far = next((station.name for station in self.run if station.own), None)
        if far is not None and not policy.has_16_bit:
            raise ValueError(f"station {clean(far, 30)!r} was made in float32, and is said to be far from float32")
        for side in self.sides:
            self._check_figures(side)
        if len(self.run) > MAX_BLOCKS or len({station.name for station in self.run}) != len(self.run):
            raise ValueError(f"run has {len(self.run)} stations, or two of one name")

    def _check_figures(self, side: SideJson) -> None:
        """Raise ValueError unless `side` has figures for all blocks or none, and for all results of a block or none."""
        if len(side.figures) not in (0, len(self.blocks)):
            raise ValueError(f"a side has figures of {len(side.figures)} blocks, of {len(self.blocks)}")
        for block, figures in zip(self.blocks, side.figures, strict=False):
            if len(figures) not in (0, len(block.results)):
                shown = f"{len(figures)} figures of {len(block.results)} results"
                raise ValueError(f"block {clean(block.name, 60)} has {shown}")
