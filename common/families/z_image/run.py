"""One image by Z-Image: its inputs that are made once, and the denoiser that calls the transformer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.networks.zimage_conditioning import time_row
from qwenimg.common.networks.zimage_dit import PATCH
from qwenimg.common.numbers import packing
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, phases
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array

if TYPE_CHECKING:
    from qwenimg.common.families.z_image.model import ZImage


class ZImageRun:
    """A run for one request; the denoised image is x + sigma prediction, as the model predicts image - noise. `grid`:
    rows and columns of tokens."""

    def __init__(self, model: ZImage, request: Request, plan: SamplingPlan, grid: tuple[int, int]):
        self.model, self.request, self.grid = model, request, grid
        branches, tokens = model.guidance.branches(request), grid[0] * grid[1]
        self.texts = model.texts.states([branch.prompt for branch in branches])
        stage = model.steps(request, plan, tokens, [text.shape[1] for text in self.texts])
        self.transformer, _ = model.residents.enter(stage)
        self.phases = phases(plan, branches, 1, self._pass)
        self.shapes = {
            "text": ", ".join(str(list(text.shape)) for text in self.texts),
            "tokens": f"{grid[0]} x {grid[1]} = {tokens}",
        }

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            "transformer",
            self.phases,
            lambda x, sigma, prediction: x + sigma * prediction,
            partial(self.model.guidance.combined, self.model.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _pass(self, positions: tuple[int, ...]) -> Pass:
        """Return the call of the transformer for one branch."""
        [position] = positions
        condition = self.transformer.condition(self.texts[position], self.grid)
        dtype, timestep = self.model.runtime.precision.time_dtype(), self.model.schedule_config.timestep
        return Pass(self.transformer, condition, lambda x, sigma: (x, time_row(timestep(sigma), dtype)))

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(packing.pack(latents, channels_last=True))

    def latents(self, x: Array) -> Latents:
        shape = self.grid[0] * PATCH, self.grid[1] * PATCH
        return packing.unpack(self.model.engine.numpy(x), *shape, channels_last=True).astype(np.float32)

    def close(self) -> None:
        """Free the run's arrays on the device, before the VAE decodes."""
        self.phases, self.texts = [], []
        del self.transformer  # which may be freed for the VAE
