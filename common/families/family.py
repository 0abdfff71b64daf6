"""A family of models as a row of data: all that the rest of the program needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from qwenimg.common.families.choices import Choices, Prediction
from qwenimg.common.families.description import Description, of_merged
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.part_file import PartFile, part_of
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import lora_layers
from qwenimg.common.parts.control_net import Controller
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.loras.lora_keys import Module
from qwenimg.common.weights.loras.lora_names import Names

Model: TypeAlias = Callable[[Runtime, Checkpoint], DiffusionModel]


def _check_nothing(checkpoint: Checkpoint) -> None:
    """Do nothing, for a family whose files are checked completely when they are opened."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    title: str
    pipelines: frozenset[str]  # class names in model_index.json
    refused: Mapping[str, str] = field(default_factory=dict)  # start of a class's name: why it is not supported
    networks: tuple[Network, ...]  # all that its models may have, the denoiser first
    denoiser: str  # the folder of the denoiser
    components: tuple[tuple[str, ...], ...]  # folders with weights: at least one of each group; the denoiser's first
    precision: DenoiserKind
    # The network of each folder of its known models, for those without files here
    parts: Mapping[str, Network] = field(default_factory=dict)
    # Completes a known model without files from the folder of its published configurations
    published: Callable[[Checkpoint, Path], Checkpoint] = lambda checkpoint, folder: checkpoint
    fits: tuple[Fit, ...] = ()  # of its parts to each other
    options: frozenset[str] = frozenset()  # of some families, see `FamilyOptions`, that some of its models take
    choices: frozenset[str] = frozenset()  # the fields of `Choices` that it takes
    open: Callable[[Path, Choices], Checkpoint]  # a folder in diffusers layout, or in another that it reads
    reads_file: Callable[[Header], bool] | None = None  # whether one file with this header is a model of the family
    # The description of one file with this header and the user's prediction; None for another family's file
    describe_file: Callable[[Header, Prediction | None], Description | None] | None = None
    # The parts in files of their own, by the option that takes them; of a family with another rule, `part` returns the
    # option for a header: `model`, one of PARTS, or None for another family's file
    files: Mapping[str, PartFile] = field(default_factory=dict)
    part: Callable[[Header], str | None] | None = None
    # Opens the parts of a whole model in one file, to describe it
    open_parts: Callable[[Path], Mapping[str, Component]] | None = None
    # The known model that a transformer, a folder or file, is of; only for a family whose parts need no model's folder,
    # since its configurations ship
    model_of: Callable[[Path, Choices], str] | None = None
    model: Model  # the class, or what chooses one by the checkpoint
    lora_names: Callable[[Checkpoint], Names] = lora_layers.names  # of the layers that LoRAs may change
    # The title of the models that a LoRA with these modules fits, more exact than the family's
    lora_title: Callable[[Mapping[str, Module]], str] | None = None
    # Whether the path of a LoRA names one that --control takes: no tensor tells it from others
    names_control: Callable[[Path], bool] | None = None
    class_name: Callable[[Checkpoint], str] | None = None  # in model_index.json, for a family with several
    # The JSON files, by path, that `convert` writes for a model without its small files
    small_files: Callable[[Checkpoint], dict[str, dict[str, object]]] | None = None
    defaults: Callable[[Checkpoint], Defaults]
    check: Callable[[Checkpoint], None] = _check_nothing  # of what opening does not check, such as the sampler
    control: Callable[[Path, Checkpoint], Controller] | None = None  # opens the folder or file of --control
    control_networks: tuple[Network, ...] = ()  # of what `control` opens
    # The known control network of this name, as it is published and without files; None for another name
    published_control: Callable[[str], Controller | None] | None = None
    described: Callable[[Path], str]  # the model in a folder and its purpose, for `info`
    refines: str = ""  # the models that take a refiner, for a message
    check_refiner: Callable[[Checkpoint, Checkpoint | None], None] | None = None  # of a base and its refiner or None

    def option(self, header: Header) -> str | None:
        """Return the option that takes a file with this header: `model`, one of PARTS, `control`, or None for another
        family's file."""
        if self.part is not None:
            return self.part(header)
        is_model = self.reads_file is not None and self.reads_file(header)
        return "model" if is_model else part_of(self.files, header)

    def describe(self, header: Header, prediction: Prediction | None) -> Description | None:
        """Return the description of one file with this header; None for another family's file, or a part without a
        description of its own. prediction: the user's."""
        if self.describe_file and (described := self.describe_file(header, prediction)) is not None:
            return described
        denoiser = self.files.get("transformer")
        if denoiser is not None and (similar := denoiser.describe_similar(header)) is not None:
            return similar
        option = self.option(header)
        if option == "model" and self.open_parts is not None:
            return of_merged(f"{self.title}, single file", header, self.open_parts, self.fits)
        return self.files[option].describe(header, option) if option and option in self.files else None
