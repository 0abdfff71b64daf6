"""Inpainting with any model and any sampler: outside the mask the denoiser's answer is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwenimg.common.pipeline.initial import Initial, Latents
from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Schedule


@dataclass(frozen=True, kw_only=True, eq=False)
class Blend:
    """Outside the mask the model is shown the picture at the step's own noise level, and its answer is replaced by the
    picture; a sampler then carries the picture's noise down by itself. With deterministic samplers this equals blending
    the latents after every step, as diffusers does."""

    schedule: Schedule
    inside: Array
    image: Array
    noise: Array

    def shown(self, x: Array, sigma: float) -> Any:
        if sigma == self.schedule.sigmas[0]:  # what the run starts from, which may be noise alone
            return x
        known = self.schedule.alpha(sigma) * self.image + sigma * self.noise
        return known + self.inside * (x - known)

    def kept(self, denoised: Array) -> Any:
        return self.image + self.inside * (denoised - self.image)


def blend(initial: Initial, schedule: Schedule, array: Callable[[Latents], Array]) -> Blend | None:
    """What keeps the picture outside the mask along `grid`; None where there is none, or the model is shown it."""
    if not initial.blends:
        return None
    assert initial.mask is not None and initial.image is not None
    inside = array(initial.mask.inside.repeat(initial.image.shape[1], axis=1))
    return Blend(schedule=schedule, inside=inside, image=array(initial.image), noise=array(initial.noise))
