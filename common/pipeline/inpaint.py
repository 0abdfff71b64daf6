"""What a run starts from, and inpainting with any model and any sampler: outside the mask the picture is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Schedule

Latents: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """What of a picture is made anew. `masked` is there for a model that gets the mask itself."""

    inside: Latents  # [1, 1, h, w], 1 where the picture is made anew
    masked: Latents | None = None  # [1, C, h, w], latents of the picture without what the mask covers

    @property
    def channels(self) -> list[Latents]:
        """What a model that gets the mask takes beside its latents."""
        return [] if self.masked is None else [self.inside, self.masked]

    def paste(self, latents: Latents, outside: Latents | None) -> Latents:
        """`latents` inside the mask and `outside` elsewhere; `latents` alone where the model itself gets the mask."""
        return latents if outside is None or self.masked is not None else np.where(self.inside > 0, latents, outside)


@dataclass(frozen=True, kw_only=True, eq=False)
class Initial:
    """What a run starts from: the noise, and of a picture that is given its latents and what of them may change."""

    noise: Latents  # [1, C, h, w]
    latents: Latents | None = None  # [1, C, h, w] of the picture to start from, as the sampler sees them
    mask: Mask | None = None

    @property
    def blends(self) -> bool:
        """Whether the picture is kept outside a mask that the model does not get."""
        return self.mask is not None and self.latents is not None and self.mask.masked is None


@dataclass(frozen=True, kw_only=True, eq=False)
class Blend:
    """Outside the mask the model gets the picture at the step's own noise level, and what it predicts is replaced by
    the picture; a sampler then takes the noise off the picture by itself. With deterministic samplers this equals
    blending the latents after every step, as diffusers does."""

    schedule: Schedule
    inside: Array
    latents: Array
    noise: Array

    def shown(self, x: Array, sigma: float) -> Any:
        if sigma == self.schedule.sigmas[0]:  # what the run starts from, which may be noise alone
            return x
        known = self.schedule.alpha(sigma) * self.latents + sigma * self.noise
        return known + self.inside * (x - known)

    def kept(self, denoised: Array) -> Any:
        return self.latents + self.inside * (denoised - self.latents)


def blend(initial: Initial, schedule: Schedule, array: Callable[[Latents], Array]) -> Blend | None:
    """What keeps the picture outside the mask along `schedule`; None where there is no mask, or the model gets it."""
    if not initial.blends:
        return None
    assert initial.mask is not None and initial.latents is not None
    inside = array(initial.mask.inside.repeat(initial.latents.shape[1], axis=1))
    return Blend(schedule=schedule, inside=inside, latents=array(initial.latents), noise=array(initial.noise))
