"""One image by Qwen-Image: its inputs that are made once, and the denoiser that calls the transformer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.numbers import packing
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, phases
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array

if TYPE_CHECKING:
    from qwenimg.common.families.qwen_image.model import QwenImage


class QwenRun:
    """A run for one request; the denoised image is x - sigma velocity. `grid`: frames, rows and columns of tokens."""

    def __init__(self, model: QwenImage, request: Request, plan: SamplingPlan, grid: tuple[int, int, int]):
        self.model, self.request, self.grid = model, request, grid
        self.rows = {sigma: i for i, sigma in enumerate(plan.asked())}  # of the modulation
        branches, tokens = model.guidance.branches(request), grid[1] * grid[2]
        texts = model.texts.states([branch.prompt for branch in branches])
        stages = model.steps(request, plan, tokens, [text.shape[1] for text in texts])
        self.modulation = model.modulation(model.timesteps(plan), stages[0])
        self.transformer, split = model.residents.enter(stages[-1])
        self.phases = phases(
            plan, branches, split.size or len(texts), lambda positions: self._pass([texts[i] for i in positions])
        )
        self.shapes = {
            "text": ", ".join(str(list(text.shape)) for text in texts),
            "tokens": f"{grid[1]} x {grid[2]} = {tokens}",
        }

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            "transformer",
            self.phases,
            lambda x, sigma, velocity: x - sigma * velocity,
            partial(self.model.guidance.combined, self.model.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _pass(self, texts: Sequence[Array]) -> Pass:
        """Return the call of the transformer for a batch of branches."""
        condition = self.transformer.condition(texts, [self.grid])
        return Pass(self.transformer, condition, lambda x, sigma: (x, (self.modulation, self.rows[sigma])))

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(packing.pack(latents))

    def latents(self, x: Array) -> Latents:
        patch = self.model.config.patch_size
        shape = self.grid[1] * patch, self.grid[2] * patch
        return packing.unpack(self.model.engine.numpy(x), *shape).astype(np.float32)

    def close(self) -> None:
        """Free the run's arrays on the device, before the VAE decodes."""
        self.phases, self.modulation = [], None
        del self.transformer  # which may be freed for the VAE
