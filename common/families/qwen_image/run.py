"""One picture by Qwen-Image: what is made once for it, and the denoiser that calls the transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qwenimg.common.numbers import packing
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, Guidance
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array

if TYPE_CHECKING:
    from qwenimg.common.families.qwen_image.model import QwenImage


class QwenRun:
    """One request: the picture is x - sigma velocity. `grid`: frames, rows and columns of tokens."""

    def __init__(self, model: QwenImage, request: Request, plan: SamplingPlan, grid: tuple[int, int, int]):
        self.model, self.request, self.grid = model, request, grid
        self.rows = {sigma: i for i, sigma in enumerate(plan.asked())}  # of the modulation
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        texts, tokens = model.states(prompts), grid[1] * grid[2]
        stages = model.steps(request, plan, tokens, [text.shape[1] for text in texts])
        self.modulation = model.modulation(model.timesteps(plan), stages[0])
        self.transformer, split = model.residents.enter(stages[-1])
        together = split.size or len(texts)
        batches = [texts[i : i + together] for i in range(0, len(texts), together)]
        self.conditions = [self.transformer.condition(batch, [grid]) for batch in batches]
        self.branches = len(texts)
        self.guided_above = plan.guided_above(request.cfg_end)
        self.alone = self._alone(texts[:1]) if request.guided and request.cfg_end < 1 else None
        self.shapes = {
            "text": ", ".join(str(list(text.shape)) for text in texts),
            "tokens": f"{grid[1]} x {grid[2]} = {tokens}",
        }

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            "transformer",
            [self._pass(condition) for condition in self.conditions],
            lambda x, sigma, velocity: x - sigma * velocity,
            Guidance(scale=self.request.guidance, keep_norm=True),
            branches=self.branches,
            alone=self.alone,
            guided_above=self.guided_above,
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _alone(self, text: Sequence[Array]) -> Pass:
        """The call of the model for the prompt's branch."""
        together = len(self.conditions) < self.branches
        return self._pass(self.transformer.condition(text, [self.grid]) if together else self.conditions[0])

    def _pass(self, condition: Any) -> Pass:
        return Pass(self.transformer, lambda x, sigma: (x, condition, self.modulation, self.rows[sigma]))

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(packing.pack(latents))

    def latents(self, x: Array) -> Latents:
        patch = self.model.config.patch_size
        shape = self.grid[1] * patch, self.grid[2] * patch
        return packing.unpack(self.model.engine.numpy(x), *shape).astype(np.float32)

    def close(self) -> None:
        """Frees what the run holds on the device, before the VAE decodes."""
        self.conditions, self.modulation, self.alone = [], None, None
        del self.transformer  # which may be freed for the VAE
