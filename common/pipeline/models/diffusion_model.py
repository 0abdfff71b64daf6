"""The interface between a family of models, such as Qwen-Image, and the one denoise loop in `pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.control_net import Controller
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline.steps.denoiser import Denoiser
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.group import Sharing
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights.loras.lora import Deltas
from qwenimg.common.weights.loras.lora_names import Names

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


class DiffusionModel(Protocol):
    """One opened model on one engine."""

    runtime: Runtime
    residents: Residents
    vae: VAEHalves
    multiple: int  # pixels: sizes are rendered at the next multiple and cropped
    scale: int  # pixels to a latent
    channels: int  # of the latents
    guidance: Guidance
    options: frozenset[str]  # the special options of `Request` that it takes
    images: tuple[int, int]  # the fewest and the most of a request
    sees_alpha: bool  # True: images of a request keep their alpha; else they are put on white
    writes_prompts: bool  # True: it writes the prompt of a request without one
    repeats_images: bool  # True: from the noise that an image of a request was made of, the model draws it again
    # Mask and masked image are inputs of the model itself, and the mask has so many values along a side of a latent: 1,
    # or that of every pixel (`scale`); 0: they are no inputs
    sees_mask: int
    soft_masks: bool  # True: a latent at the edge of a mask is regenerated in part
    few_steps: Mapping[str, FewSteps]  # by name
    nets: Mapping[str, Controller]  # the control networks and LoRAs of the present request, by their names in it

    @property
    def lora_names(self) -> Names:
        """The names of the layers that LoRAs may change."""
        ...

    def plan(self, request: Request) -> SamplingPlan:
        """Return sampler and schedule. Loads nothing. Raises UsageError."""
        ...

    def sharing(self, request: Request) -> Sharing:
        """Return how the ranks share a run. Raises UsageError."""
        ...

    def warnings(self, request: Request) -> list[str]: ...

    def frames(self, request: Request) -> int:
        """Return the number of images that are drawn at once: 1, or for a model of layers one more than these. The
        first is then their composite, which is dropped."""
        ...

    def references(self, request: Request) -> list[Latents]:
        """Return the pixels [1, C, H, W] in -1..1 of images that the model sees beside the text, each in a size of its
        own that the VAE takes."""
        ...

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        """Return the stages of a run in their order. Loads nothing. counted: count the tokens of prompts; else each
        prompt counts as the longest."""
        ...

    def variant(self, change: Change) -> Self:
        """Return an unloaded copy under changed options, for memory plans."""
        ...

    def check_weights(self) -> None:
        """Read the weights that are loaded only after some steps, once, without keeping any. Raises ModelError."""
        ...

    def announce(self, prompts: Sequence[str], clip_skip: int = 0, images: Sequence[Image] = ()) -> None:
        """Encode as many of `prompts` as fit now; the rest is encoded when it is needed. images: the images of all
        requests."""
        ...

    def adapt(self, deltas: Deltas) -> None:
        """Replace the LoRA deltas of the weights by `deltas`, and read again those weights of open networks that the
        LoRAs change. Raises ModelError and NumericsError."""
        ...

    def control(self, nets: Mapping[str, Controller]) -> None:
        """Replace the control networks and LoRAs of the last request by `nets`, by their names in the next one. Loads
        nothing."""
        ...

    def with_prompt(self, request: Request) -> Request:
        """Return the request with the prompt that is encoded next: its own, or one that the model writes from it.
        Raises UsageError for one that cannot be written."""
        ...

    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> AbstractContextManager[PreparedRun]:
        """Encode the texts for a run with latents of `shape`. A model with one denoiser loads it here, and computes
        what depends on no step. At the end of the context, free the run's memory on the device."""
        ...

    def forget(self) -> None:
        """Drop the results that are kept for later images: text states, modulation."""
        ...

    def close(self) -> None: ...


def renew(model: DiffusionModel, part: str) -> None:
    """Free everything that depends on the policy of `part`: for the VAE its weights, for other parts everything."""
    model.residents.free("vae" if part == "vae" else "")
    if part != "vae":
        model.forget()
