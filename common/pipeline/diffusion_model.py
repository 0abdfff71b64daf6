"""The interface between a family of models, such as Qwen-Image, and the one denoise loop in `pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.pipeline.denoiser import Denoiser
from qwenimg.common.pipeline.guidance import Guidance
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.runtime.vae import Shape
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.lora_names import Names


class PreparedRun(Protocol):
    """One request on a model whose texts are encoded and whose denoiser is loaded."""

    shapes: dict[str, str]  # what goes through the models, for --debug

    def array(self, latents: Latents) -> Array:
        """Return latents [1, C, h, w] as the array that the sampler moves."""
        ...

    def latents(self, x: Array) -> Latents:
        """Return the latents of such an array, in float32."""
        ...

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser: ...


class DiffusionModel(Protocol):
    """One opened model on one engine."""

    runtime: Runtime
    residents: Residents
    multiple: int  # pixels: sizes are rendered at the next multiple and cropped
    scale: int  # pixels to a latent
    channels: int  # of the latents
    guidance: Guidance
    sees_mask: bool  # whether the model itself is given mask and masked picture
    few_steps: Mapping[str, FewSteps]  # by name

    @property
    def lora_names(self) -> Names:
        """Names of the layers that LoRAs may change."""
        ...

    def plan(self, request: Request) -> SamplingPlan:
        """Return sampler and schedule. Loads nothing. Raises UsageError."""
        ...

    def warnings(self, request: Request) -> list[str]: ...

    def stages(self, request: Request, plan: SamplingPlan, shape: Shape, counted: bool = True) -> list[Stage]:
        """Return the stages of a run in their order. Loads nothing. counted: whether the tokens of prompts are; else
        each is taken for the longest."""
        ...

    def variant(self, change: Change) -> Self:
        """Return an unloaded copy under changed options, for memory plans."""
        ...

    def check_weights(self) -> None:
        """Read the weights that are loaded only after some steps, once, and keep none. Raises ModelError."""
        ...

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        """Encode as many of `prompts` as fit now, the rest when they are needed."""
        ...

    def adapt(self, deltas: Deltas) -> None:
        """Replace the LoRA deltas of the weights by `deltas`, and read the loaded weights that change again. Raises
        ModelError and NumericsError."""
        ...

    def prepare(self, request: Request, plan: SamplingPlan, shape: Shape) -> AbstractContextManager[PreparedRun]:
        """Encode the texts, load the denoiser and compute what depends on no step, for latents of `shape`; on leaving,
        free what the run held on the device."""
        ...

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        """Return mean and deviation of the latents [1, C, h, w] of pixels [1, 3, H, W] in -1..1, as the sampler sees
        them."""
        ...

    def decode(self, latents: Latents) -> NDArray[Any]:
        """Return pixels [1, 3, H, W], about -1 to 1, all finite. Raises NumericsError."""
        ...

    def forget(self) -> None:
        """Drop what was computed for later images: text states, modulation."""
        ...

    def close(self) -> None: ...


def renew(model: DiffusionModel, part: str) -> None:
    """Free what was made under another policy of `part`: for the VAE its weights, for other parts everything."""
    model.residents.free("vae" if part == "vae" else "")
    if part != "vae":
        model.forget()
