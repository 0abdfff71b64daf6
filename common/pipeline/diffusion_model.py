"""What a family of models (Qwen-Image, Stable Diffusion) gives the one denoise loop in `pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.plan import Plan, Stage
from qwenimg.common.pipeline.request import Request
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.estimate import Needs
from qwenimg.common.runtime.runtime import Keeper
from qwenimg.common.sampling.types import Denoiser

Latents: TypeAlias = NDArray[np.float32]

CALLS = 4  # of the model that a run remembers, to look at when a result is not finite: no step makes more


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """What a run starts from: the noise, and of a picture that is given its latents and what of them may change."""

    noise: Latents  # [1, C, h, w]
    image: Latents | None = None  # [1, C, h, w], as the sampler sees them
    mask: Latents | None = None  # [1, 1, h, w], 1 where the picture is made anew
    masked: Latents | None = None  # [1, C, h, w], of the picture without what the mask covers


class Run(Denoiser, Protocol):
    """A denoiser of one request, which can say why its last result was not finite."""

    def explain(self, step: int) -> NumericsError: ...


class Family(Protocol):
    """One opened model on one engine."""

    keeper: Keeper
    multiple: int  # pixels: sizes are rendered at the next multiple and cropped
    scale: int  # pixels to a latent
    channels: int  # of the latents
    sees_mask: bool  # whether the model itself is given mask and masked picture

    def plan(self, request: Request) -> Plan:
        """Sampler and schedule. Raises UsageError; loads nothing."""
        ...

    def warnings(self, request: Request) -> list[str]: ...

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        """Encodes what fits of `prompts` now, the rest in its turn."""
        ...

    def needs(self, request: Request, plan: Plan, shape: tuple[int, int]) -> Needs:
        """What the picture will take beside what is loaded already. Loads nothing."""
        ...

    def begin(self, request: Request, plan: Plan, shape: tuple[int, int]) -> None:
        """Loads and computes what depends on no step, for latents of `shape` (rows, columns)."""
        ...

    def end(self) -> None:
        """Frees what `begin` made, also after a run that failed or was given up."""
        ...

    def run(self, stage: Stage, start: Start) -> Run:
        """The denoiser for one stage of the request that `begin` was called with."""
        ...

    def array(self, latents: Latents) -> Array:
        """Latents [1, C, h, w] as the array that the sampler moves."""
        ...

    def latents(self, x: Array, shape: tuple[int, int]) -> Latents:
        """The other way."""
        ...

    def check_encoding(self, height: int, width: int) -> None:
        """Raises DoesNotFit where a picture of so many pixels could not be encoded."""
        ...

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        """Mean and deviation of the latents [1, C, h, w] of pixels [1, 3, H, W] in -1..1, as the sampler sees them."""
        ...

    def decode(self, latents: Latents) -> NDArray[Any]:
        """Pixels [1, 3, H, W], about -1 to 1, all finite. Raises NumericsError."""
        ...

    def shapes(self) -> dict[str, str]:
        """What went through the models in the last run, for people."""
        ...

    def free_transformer(self) -> None: ...

    def close(self) -> None: ...
