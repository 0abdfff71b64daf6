"""A parity passport: the results of one model on one machine, block by block, so that another machine can repeat them.

Next to the recording backend's results stand float64 results for the same inputs and weights; every backend is judged
against these. These classes are the schema of the file too (docs/measured/parity.md), which `passport_file` reads and
writes: a field is a key, with the bounds that a file is checked for. A new key has a default, for older files that lack
it, and is `_LATER`. Names in a passport are looked up like those of an image's recipe: no field opens a path."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.text import clean
from qwenimg.common.families import registry
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.parity.passport.recorded_training import RecordedTraining
from qwenimg.common.parity.sample import LARGEST, PROJECTIONS, Drawn, called
from qwenimg.common.parity.stations import Station
from qwenimg.common.precision import precision
from qwenimg.common.prompts import inversion
from qwenimg.common.prompts.check import check_not_blank
from qwenimg.common.request import control_text
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.names import CONTROL_MODES, check_control_mode
from qwenimg.common.request.parts import PARTS
from qwenimg.common.request.recipe import recorded_loras
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.traced import Dtype, Values
from qwenimg.common.weights import quantize

MAX_GAIN = 128.0  # in bfloat16 the limit of a larger gain would exceed the update, and every result would pass
MAX_BLOCKS = 10_000
MAX_NAME = 200  # characters
MAX_TOKENS = 512  # of the text of `RecordedWriting`
PREDICTIONS = ("", "eps", "v", "x0")
_SHA256 = re.compile("[0-9a-f]{64}")

_LATER = {"later": True}  # a key that is written only if it is not empty
_COUNT = {"min": 0, "max": 2**53}
_SIZE = {"min": 0, "max": LARGEST}
_SCALE = {"min": 0, "max": control_text.MAX_SCALE}
_SHARE = {"min": 0, "max": 1}

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
    operations: dict[str, int] = field(metadata=_COUNT)  # their numbers, by name and dtype of the result

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError(f"block {clean(self.name, 60)} has no result")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The error of one backend's result of a block, relative to float64, in units of roundoff."""

    error: float
    allowed: float
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedWriting:
    """A text that the model's text encoder reads, and one that it writes after it; see `parity.writing`."""

    component: str  # its name in the checkpoint
    ids: str  # SHA-256 of the tokens that are read
    exact: NDArray[np.float64]  # projections of the scores of each next token, in float64
    highest: tuple[tuple[int, ...], ...] = field(metadata=_COUNT)  # the tokens of the highest ones, the highest first
    values: NDArray[np.float64]  # their scores
    noise: float = field(metadata=_SIZE)  # the largest error of these scores where it was recorded
    gain: float = field(metadata={"min": 1, "max": MAX_GAIN})  # the change of the scores per rounding of the weights
    written: tuple[int, ...] = field(metadata=_COUNT)  # the tokens that it writes in float32; () in 16 bit
    figure: Figure  # of the backend that recorded it

    def __post_init__(self) -> None:
        rows = len(self.highest)
        if not 1 <= rows <= MAX_TOKENS or len(self.written) > MAX_TOKENS:
            raise ValueError(f"a text of {rows} tokens, and {len(self.written)} that are written")
        if self.exact.shape != (rows, PROJECTIONS) or not np.isfinite(self.exact).all():
            raise ValueError(f"projections of shape {clean(self.exact.shape, 40)}, for {rows} tokens")
        shapes = {(len(self.highest), len(row)) for row in self.highest}
        if shapes != {self.values.shape} or self.values.shape[1] < 2 or not np.isfinite(self.values).all():
            raise ValueError(f"scores of shape {clean(self.values.shape, 40)}, which are not of the highest tokens")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend on a machine, and the figures of its results for each recorded block."""

    backend: str
    device: str
    versions: dict[str, str]
    tf32: bool
    figures: tuple[tuple[Figure, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The identity of a model: its names, and the fingerprints of its files."""

    name: str
    family: str
    quantize: str
    fingerprints: dict[str, str]  # of each component's files
    shapes: dict[str, str]  # hash of the names and shapes of each component's parameters
    parts: dict[str, str] = field(default_factory=dict, metadata=_LATER)  # names of the parts given beside the model
    prediction: str = field(default="", metadata=_LATER)
    lora: str = field(default="", metadata=_LATER)  # names with strengths, in a recipe's form
    lora_fingerprints: tuple[str, ...] = field(default=(), metadata=_LATER)  # of their files

    def __post_init__(self) -> None:
        if self.quantize:
            quantize.parse(self.quantize)
        if self.prediction not in PREDICTIONS:
            raise ValueError(f"the prediction {clean(self.prediction, 30)!r} is none of eps, v, x0")
        if unknown := self.parts.keys() - set(PARTS):
            raise ValueError(f"{clean(min(unknown), 30)!r} is none of the parts {', '.join(PARTS)}")
        if len(self.loras) != len(self.lora_fingerprints):
            raise ValueError("the LoRAs and their fingerprints are not of one number")

    @property
    def loras(self) -> tuple[Lora, ...]:
        return recorded_loras({"lora": self.lora})


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """The keywords of the recorded call, without the files: LoRAs, controls and mask. `pictures`: how many pictures of
    `sample.SEEN` the model sees or the mask belongs to; `strength`: with a mask."""

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
    control_mode: str | None = None
    pictures: int | None = field(default=None, metadata={"min": 1, "max": 2})

    def __post_init__(self) -> None:
        keywords = called(self.keywords())
        check_control_mode(keywords.pop("control_mode", CONTROL_MODES[0]))
        Request(**keywords | {"image": tuple(keywords["image"])} if self.pictures else keywords)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of the call, as `called` takes them."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RecordedControl:
    """One control of a recorded run."""

    name: str  # of its network or LoRA, without folders; "": the model itself sees the picture
    fingerprint: str  # of its files
    preprocessor: str
    scale: float = field(metadata=_SCALE)
    start: float = field(metadata=_SHARE)
    end: float = field(metadata=_SHARE)
    picture: NDArray[np.uint8]  # [H, W, 3] of the image's size, before the preprocessor
    parts: dict[str, float] = field(default_factory=dict, metadata=_SCALE | _LATER)  # the scale in parts of the model

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME or (not self.name) != (self.fingerprint == fingerprint(())):
            raise ValueError(f"a control called {clean(self.name, 30)!r}")
        if _SHA256.fullmatch(self.fingerprint) is None:
            raise ValueError(f"control {clean(self.name, 30)!r} has the fingerprint {clean(self.fingerprint, 30)!r}")
        known = ("", *control_text.PREPROCESSORS, *control_text.ROLES, *control_text.KINDS)
        if self.preprocessor not in known:
            raise ValueError(f"the preprocessor {clean(self.preprocessor, 30)!r} is not one of this version")
        if self.start > self.end:
            raise ValueError(f"control {clean(self.name, 30)!r} starts at {self.start:g}, behind its end")


@dataclass(frozen=True, kw_only=True)
class RecordedImage:
    """The run that was recorded, and its image."""

    asked: dict[str, Any]  # the keywords of a RecordedCall
    sigmas: tuple[float, ...] = field(metadata=_SIZE)
    noise: str  # SHA-256 of the initial noise
    latents: NDArray[np.float32]
    pixels: NDArray[np.uint8]
    controls: tuple[RecordedControl, ...] = field(default=(), metadata=_LATER)
    mask: NDArray[np.uint8] | None = field(default=None, metadata=_LATER)  # [H, W] of the picture that it belongs to
    # SHA-256 of the file of each embedding that the prompts name, by its name
    embeddings: dict[str, str] = field(default_factory=dict, metadata=_LATER)

    def __post_init__(self) -> None:
        latents, pixels = self.latents, self.pixels
        if not self.controls:  # with a picture as text, a prompt may be blank
            check_not_blank(self.asked["prompt"])
        if len(self.controls) > control_text.MOST:
            raise ValueError(f"{len(self.controls)} controls; at most {control_text.MOST} are taken")
        if len(self.embeddings) > inversion.MOST:
            raise ValueError(f"{len(self.embeddings)} embeddings; at most {inversion.MOST} are read")
        for name, mark in self.embeddings.items():
            if not 0 < len(name) <= MAX_NAME or _SHA256.fullmatch(mark) is None:
                raise ValueError(f"embedding {clean(name, 30)!r} has the hash {clean(mark, 30)!r}")
        if latents.ndim != 4 or not np.isfinite(latents).all():
            raise ValueError(f"latents of shape {clean(latents.shape, 40)}, expected four axes of finite numbers")
        if pixels.shape not in [(self.asked["height"], self.asked["width"], channels) for channels in (3, 4)]:
            raise ValueError(f"pixels of shape {clean(pixels.shape, 40)}, which is not the size that was asked for")


@dataclass(frozen=True, kw_only=True)
class Passport:
    version: str  # of qwenimg
    created: str
    model: Model
    precision: str  # the policy's name
    places: dict[str, str]  # the dtype of each component and FP32 place
    picture: RecordedImage | None  # None for a trace of another program
    blocks: tuple[Recorded, ...]
    sides: tuple[Side, ...]  # the first one recorded it
    run: tuple[Station, ...] = field(default=(), metadata=_LATER)  # the image's stations; () for a trace
    # None for a model whose text encoder cannot write
    writing: RecordedWriting | None = field(default=None, metadata=_LATER)
    training: RecordedTraining | None = field(default=None, metadata=_LATER)  # in place of image and blocks

    def __post_init__(self) -> None:
        if self.training is not None and (self.picture is not None or self.blocks or self.run):
            raise ValueError("a passport of a training has neither picture nor blocks")
        if not (self.training is not None or 1 <= len(self.blocks) <= MAX_BLOCKS) or not self.sides:
            raise ValueError(
                f"{len(self.blocks)} blocks on {len(self.sides)} sides; there are 1 to {MAX_BLOCKS}, on one"
            )
        kinds = {family.name: family.precision for family in registry.FAMILIES}
        if self.model.family not in kinds:
            raise ValueError(f"the family {clean(self.model.family, 30)!r} is none of {', '.join(kinds)}")
        policy = precision.parse(self.precision, on_gpu=False, kind=kinds[self.model.family])
        far = next((station.name for station in self.run if station.policy_error), None)
        if far is not None and not policy.is_reduced:
            raise ValueError(f"station {clean(far, 30)!r} was made in float32, and is said to be far from float32")
        for side in self.sides:
            self._check_figures(side)
        if len(self.run) > MAX_BLOCKS or len({station.name for station in self.run}) != len(self.run):
            raise ValueError(f"run has {len(self.run)} stations, or two of one name")

    def _check_figures(self, side: Side) -> None:
        """Raise ValueError unless `side` has figures for all blocks or none, and for all results of a block or none."""
        if len(side.figures) not in (0, len(self.blocks)):
            raise ValueError(f"a side has figures of {len(side.figures)} blocks, of {len(self.blocks)}")
        for block, figures in zip(self.blocks, side.figures, strict=False):
            if len(figures) not in (0, len(block.results)):
                shown = f"{len(figures)} figures of {len(block.results)} results"
                raise ValueError(f"block {clean(block.name, 60)} has {shown}")
