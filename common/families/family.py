"""A family of models as a row of data: all that the rest of the program needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwenimg.common.families.description import Description
from qwenimg.common.families.fits import Fit
from qwenimg.common.families.load_options import LoadOptions, Prediction
from qwenimg.common.families.part_file import FamilyFile
from qwenimg.common.families.prompt_writer import PromptWriterFiles
from qwenimg.common.families.training_row import TrainingRow
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.network import Network
from qwenimg.common.parts import lora_layers
from qwenimg.common.parts.control_net import Controller, Encoders, PictureAdapter
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.precision.precision import DenoiserKind
from qwenimg.common.request.request import Defaults
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.weights.loras.lora_keys import Module
from qwenimg.common.weights.loras.lora_metadata import LoraBase
from qwenimg.common.weights.loras.lora_names import Names
from qwenimg.common.weights.loras.lora_writing import LayerName

ONE_TEXT_ENCODER = frozenset({"transformer", "text_encoder", "vae", "tokenizer"})


def _check_nothing(checkpoint: Checkpoint) -> None:
    """Do nothing, for a family whose files are checked completely when they are opened."""


@dataclass(frozen=True, kw_only=True)
class ControlFiles:
    """The files that --control takes for a family's models."""

    open: Callable[[Path, Checkpoint], Controller]  # a folder or file
    networks: tuple[Network, ...]
    adapters: tuple[Network, ...] = ()  # by which pictures are prompts
    encoders: tuple[Network, ...] = ()  # of their pictures
    # The known control network of this name, as it is published and without files; None for another name
    published: Callable[[str], Controller | None] = lambda name: None
    # Refuses a network that is published, called as the text says, for another kind of model
    check_published: Callable[[str, Controller, Checkpoint], None] = lambda name, net, checkpoint: None
    # Completes an adapter by the first of these image encoders that is its own; None: the family has none
    with_encoder: Callable[[PictureAdapter, Encoders], PictureAdapter] | None = None
    # Returns the folder or file of the adapter's weights in the folder of its pipeline, any other path unchanged
    weights: Callable[[Path], Path] = lambda path: path
    # Whether the path of a LoRA names one that --control takes: no tensor tells it from others
    names_lora: Callable[[Path], bool] = lambda path: False


@dataclass(frozen=True, kw_only=True)
class RefinerFiles:
    """The refiners of a family's models."""

    title: str  # of the models that take one, for a message
    check: Callable[[Checkpoint, Checkpoint | None], None]  # of a base and its refiner or None


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    name: str
    title: str
    pipelines: frozenset[str]  # class names in model_index.json
    refused: Mapping[str, str] = field(default_factory=dict)  # start of a class's name: why it is not supported
    # Folders with weights, at least one of each group, the denoiser's first; (): that of each of `parts`
    components: tuple[tuple[str, ...], ...] = ()
    precision: DenoiserKind
    parts: Mapping[str, Network]  # the network of each part, the denoiser's first
    folders: Mapping[str, str] = field(default_factory=dict)  # of parts whose folder has another name
    other_networks: tuple[Network, ...] = ()  # that some of its models have in place of those
    # Completes a known model without files from the folder of its published configurations
    published: Callable[[Checkpoint, Path], Checkpoint] = lambda checkpoint, folder: checkpoint
    fits: tuple[Fit, ...] = ()  # of its parts to each other
    load_options: frozenset[str] = ONE_TEXT_ENCODER  # those of `LoadOptions.of_files` that it takes
    open: Callable[[Path, LoadOptions], Checkpoint]  # a folder in diffusers layout, or in another that it reads
    files: tuple[FamilyFile, ...] = ()  # the files that it reads; one is of the first kind that reads it
    # The known model that a transformer, a folder or file, is of; only for a family whose parts need no model's folder,
    # since its configurations ship
    model_of: Callable[[Path, LoadOptions], str] | None = None
    models: Mapping[str, type[DiffusionModel]]  # by a checkpoint's variant; "": of all others
    # The base that LoRAs which are written for its models name; None: the family's name
    lora_base: Callable[[Checkpoint], LoraBase] | None = None
    # The title of the models that a LoRA with these modules fits, more exact than the family's
    lora_title: Callable[[Mapping[str, Module]], str] | None = None
    class_name: Callable[[Checkpoint], str] | None = None  # in model_index.json, for a family with several
    # The JSON files, by path, that `convert` writes for a model without its small files
    small_files: Callable[[Checkpoint], dict[str, dict[str, object]]] | None = None
    defaults: Callable[[Checkpoint], Defaults]
    check: Callable[[Checkpoint], None] = _check_nothing  # of what opening does not check, such as the sampler
    control: ControlFiles | None = None
    embeddings: bool = False  # whether prompts may name embeddings of textual inversion
    tiny_vae: Callable[[Checkpoint], str] | None = None  # the name of the tiny VAE of its latents, if one is published
    described: Callable[[Path], str]  # the model in a folder and its purpose, for `info`
    refiner: RefinerFiles | None = None
    training: TrainingRow | None = None  # None: its models learn no LoRAs
    prompt_writer: PromptWriterFiles | None = None  # a language model that was trained to rewrite its prompts

    def __post_init__(self) -> None:
        object.__setattr__(self, "components", self.components or tuple((name,) for name in self.parts))

    @property
    def denoiser(self) -> str:
        """The name of the denoiser."""
        return self.precision.denoiser

    @property
    def networks(self) -> tuple[Network, ...]:
        """All networks that its models may have, the denoiser first."""
        return tuple(dict.fromkeys((*self.parts.values(), *self.other_networks)))

    @property
    def control_networks(self) -> tuple[Network, ...]:
        """The networks of its control files."""
        one = self.control
        return () if one is None else (*one.networks, *one.adapters, *one.encoders)

    @property
    def options(self) -> frozenset[str]:
        """The options of some families, see `FamilyOptions`, that some of its models take."""
        return frozenset[str]().union(*(model.options for model in self.models.values()))

    def model(self, runtime: Runtime, checkpoint: Checkpoint) -> DiffusionModel:
        """Return the model of a checkpoint."""
        made: Any = self.models.get(checkpoint.variant) or self.models[""]  # each is made of these two
        model: DiffusionModel = made(runtime, checkpoint)
        return model

    def lora_names(self, checkpoint: Checkpoint) -> Names:
        """Return the names of the layers that LoRAs may change."""
        return lora_layers.names(checkpoint, self.parts)

    def lora_layer_names(self, checkpoint: Checkpoint) -> Callable[[str, str], LayerName]:
        """Return the function from a component and its parameter to the layer's name in a LoRA that is written."""
        return lora_layers.layer_names(checkpoint, self.parts)

    def base_of_loras(self, checkpoint: Checkpoint) -> LoraBase:
        """Return the base that a LoRA for this model names."""
        if self.lora_base is not None:
            return self.lora_base(checkpoint)
        return LoraBase(architecture=self.name, version=self.name.replace("-", "_"))

    def option(self, header: Header) -> str | None:
        """Return the option that takes a file with this header: `model`, one of PARTS, `control`, or None for another
        family's file."""
        return next((file.option for file in self.files if file.reads(header)), None)

    def opens(self, header: Header) -> bool:
        """Return whether a file with this header is opened as a model, perhaps with parts that are given."""
        return any(file.option == "model" and file.opens(header) for file in self.files)

    def describe(self, header: Header, prediction: Prediction | None) -> Description | None:
        """Return the description of one file with this header; None for another family's file. prediction: the
        user's."""
        for file in self.files:
            if file.option == "transformer" and (similar := file.describe_similar(header)) is not None:
                return similar
        own = next((file for file in self.files if file.reads(header)), None)
        return None if own is None else own.describe(header, prediction)
