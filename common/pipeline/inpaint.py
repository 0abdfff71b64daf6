"""Inpainting with any model and any sampler: outside the mask the denoised latents are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwenimg.common.pipeline.initial import Initial, Latents
from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Schedule


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
