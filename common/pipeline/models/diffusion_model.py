"""The interface between a family of models (such as Qwen-Image) and the one denoising loop in `pipeline`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.control_net import Controller, ControlNet, networks
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline.models.control_stages import ControlStages
from qwenimg.common.pipeline.models.inputs import PictureInputs
from qwenimg.common.pipeline.steps.denoiser import Denoiser
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime import group
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.group import Sharing
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights.loras.lora import Deltas

Image: TypeAlias = NDArray[np.uint8]  # [H, W, 3], or [H, W, 4] with alpha


class PreparedRun(Protocol):
    """One request on a model, with its texts encoded. Denoisers are loaded already, or when `denoiser` is called."""

    shapes: dict[str, str]  # shapes of the models' inputs, for --debug

    def array(self, latents: Latents) -> Array:
        """Return latents [1, C, h, w] as the sampler's array."""
        ...

    def latents(self, x: Array) -> Latents:
        """Return the latents of a sampler's array, in float32."""
        ...

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser: ...


class DiffusionModel(ABC):
    """One opened model on one engine. A family's class is made of a runtime and a checkpoint."""

    multiple: int = MULTIPLE  # pixels: sizes are rendered at the next multiple and cropped
    channels: int  # of the latents
    guidance: Guidance
    inputs = PictureInputs()
    options: frozenset[str] = frozenset()  # of some families, see `FamilyOptions`, that it takes
    few_steps: Mapping[str, FewSteps] = MappingProxyType({})  # by name
    nets: Mapping[str, Controller] = MappingProxyType({})  # of the present request, by their names in it
    controls: ControlStages[Any] | None = None  # of a model with control networks
    preview_vae: Component | None = None  # the tiny VAE that makes previews

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, residents: Residents, vae: VAEHalves):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.residents, self.vae = residents, vae

    @property
    def scale(self) -> int:
        """The pixels to a latent."""
        return self.vae.scale

    @property
    def heads(self) -> int:
        """The number of the denoiser's attention heads, if ranks can share its tokens; else 0."""
        return 0

    @property
    def decoded_channels(self) -> int:
        """The channels of the latents that are decoded."""
        return self.channels

    def latent_sides(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the latents that a run begins with, for an image of width x height pixels. Raises
        UsageError."""
        width, height = sizes.render_size(width, height, self.multiple)
        return height // self.scale, width // self.scale

    # An image, in the order of a run

    @abstractmethod
    def plan(self, request: Request) -> SamplingPlan:
        """Return sampler and schedule. Loads nothing. Raises UsageError."""

    def sharing(self, request: Request) -> Sharing:
        """Return how the ranks share a run. Raises UsageError."""
        return group.sharing(self.engine.group, len(self.guidance.branches(request)), self.heads)

    def warnings(self, request: Request) -> list[str]:
        return []

    def as_text(self, prompt: str) -> str:
        """Return the prompt that the model takes for the words of `prompt` alone."""
        return prompt

    @abstractmethod
    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        """Return the stages of a run in their order. Loads nothing. counted: count the tokens of prompts; else each
        prompt counts as the longest."""

    @abstractmethod
    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> AbstractContextManager[PreparedRun]:
        """Encode the texts for a run with latents of `shape`. A model with one denoiser loads it here, and computes
        what depends on no step. At the end of the context, free the run's memory on the device."""

    def learning_texts(self) -> AbstractContextManager[None]:
        """While the context is open, runs compute their texts themselves, as part of what is differentiated. Of a
        family whose `TrainingRow` has text layers."""
        raise NotImplementedError

    # Between images

    @abstractmethod
    def announce(self, requests: Sequence[Request]) -> None:
        """Encode the prompts of as many `requests` as fit now; others are encoded when needed."""

    @abstractmethod
    def adapt(self, deltas: Deltas) -> None:
        """Replace the LoRA deltas of the weights by `deltas`, and read again those weights of open networks that the
        LoRAs change. Raises ModelError and NumericsError."""

    def control(self, nets: Mapping[str, Controller]) -> None:
        """Replace the control networks and LoRAs of the last request by `nets`, by their names in the next one. Loads
        nothing."""
        before = [net.name for net in networks(self.nets.values())]
        bits = self.runtime.bits
        self.nets = nets if bits is None else {name: net.quantized(bits) for name, net in nets.items()}
        components = {net.name: net.component for net in networks(self.nets.values())}
        self.checkpoint = self.checkpoint.with_nets(components, before)
        if self.controls is not None:
            self.controls.give(self.nets)

    def variant(self, change: Change) -> Self:
        """Return an unloaded copy under changed options, for memory plans."""
        cls: Any = type(self)
        variant: Self = cls(*self.runtime.changed(self.checkpoint, change, self.residents.weights))
        variant.control({name: variant._own(net) for name, net in self.nets.items()})
        variant.preview_vae = self.preview_vae
        return variant

    def _own(self, net: Controller) -> Controller:
        """Return a control network as it is in this variant of a model."""
        return replace(net, component=self.checkpoint[net.name]) if isinstance(net, ControlNet) else net

    def check_weights(self) -> None:
        """Read the weights that are loaded only after some steps, once, without keeping any. Raises ModelError."""
        self.vae.check_weights()

    @abstractmethod
    def forget(self) -> None:
        """Drop the results that are kept for later images: text states, modulation."""

    def close(self) -> None:
        """Free everything and close the files."""
        self.residents.free()
        self.checkpoint.close()


def renew(model: DiffusionModel, part: str) -> None:
    """Free everything that depends on the policy of `part`: for the VAE its weights, for other parts everything."""
    model.residents.free("vae" if part == "vae" else "")
    if part != "vae":
        model.forget()
