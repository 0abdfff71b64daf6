"""Inpainting with any model and any sampler: outside the mask the denoiser's answer is known."""

from __future__ import annotations

from typing import Protocol

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.diffusion_model import Latents, Run, Start
from qwenimg.common.pipeline.plan import Stage
from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Grid


class _Arrays(Protocol):
    def array(self, latents: Latents) -> Array: ...


def wrap(run: Run, family: _Arrays, stage: Stage, start: Start) -> Run:
    """`run`, or where a mask is given and the model does not see it, `run` inside the mask."""
    if start.mask is None or start.image is None or start.masked is not None:
        return run
    inside = family.array(start.mask.repeat(start.image.shape[1], axis=1))
    return Blended(run, stage.grid, inside, family.array(start.image), family.array(start.noise))


class Blended:
    """Outside the mask the model is shown the picture at the step's own noise level, and its answer is replaced by the
    picture; a sampler then carries the picture's noise down by itself. With deterministic samplers this equals blending
    the latents after every step, as diffusers does."""

    def __init__(self, run: Run, grid: Grid, inside: Array, image: Array, noise: Array):
        self.run, self.grid, self.inside, self.image, self.noise = run, grid, inside, image, noise

    def __call__(self, x: Array, sigma: float) -> Array:
        return self._kept(self.run(self._shown(x, sigma), sigma))

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        guided, unguided = self.run.both(self._shown(x, sigma), sigma)
        return self._kept(guided), self._kept(unguided)

    def explain(self, step: int) -> NumericsError:
        return self.run.explain(step)

    def _shown(self, x: Array, sigma: float) -> Array:
        if sigma == self.grid.sigmas[0]:  # what the run starts from, which may be noise alone
            return x
        known = self.grid.alpha(sigma) * self.image + sigma * self.noise
        return known + self.inside * (x - known)

    def _kept(self, found: Array) -> Array:
        return self.image + self.inside * (found - self.image)
