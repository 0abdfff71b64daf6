"""A family of models as a row of data: all that the rest of the program asks about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qwenimg.common.families.choices import Choices, Prediction
from qwenimg.common.families.description import Description
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.pipeline.diffusion_model import DiffusionModel
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.lora_names import Names


def _check_nothing(checkpoint: Checkpoint) -> None:
    """Of a family whose files are checked completely when they are opened."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    title: str
    pipelines: frozenset[str]  # class names in model_index.json
    refused: Mapping[str, str] = field(default_factory=dict)  # start of a class's name: why it is not supported
    networks: tuple[Network, ...]  # the denoiser first
    denoiser: str  # the folder of the denoiser
    components: tuple[tuple[str, ...], ...]  # folders with weights: of each group one at least, the denoiser's first
    precision: DenoiserKind
    # The model known by a name, with its published configurations and weights that are nowhere; None of another
    published: Callable[[str], Checkpoint | None]
    choices: frozenset[str] = frozenset()  # of `Choices`, those that it takes
    open: Callable[[Path, Choices], Checkpoint]  # a folder in diffusers layout, or what it reads besides
    # Of a folder in another layout that `open` reads as well, what it is and by what; None of others
    reads_folder: Callable[[Path], str | None] | None = None
    reads_names: Callable[[Iterable[str]], bool] | None = None  # whether tensors of its denoiser have such names there
    reads_file: Callable[[Header], bool] | None = None  # whether one file with this header is a model of the family's
    # What is said of one file with this header, with the user's word on its prediction; None where it is not of these
    describe_file: Callable[[Header, Prediction | None], Description | None] | None = None
    # The option that a file with this header goes with: `model`, one of PARTS, or None for no file of the family's
    part: Callable[[Header], str | None]
    parts_alone: bool = False  # whether files of all parts are a model without a folder: its configurations ship
    model: Callable[[Runtime, Checkpoint, Checkpoint | None], DiffusionModel]  # with its refiner
    lora_names: Callable[[Checkpoint], Names] = lambda checkpoint: ()  # of the layers that LoRAs may change
    small_files: Callable[[Checkpoint], dict[str, object]] | None = None  # JSON by path, of one without it
    defaults: Callable[[Checkpoint], Defaults]
    check: Callable[[Checkpoint], None] = _check_nothing  # what only the model would find: tokenizer, scheduler
    described: Callable[[Path], str]  # what a folder is for
    refines: str = ""  # the models that take a refiner, for a message
    check_refiner: Callable[[Checkpoint, Checkpoint | None], None] | None = None  # of a base, with None of it alone
