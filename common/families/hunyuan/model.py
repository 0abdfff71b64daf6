"""Hunyuan-DiT: text states and v for the denoise loop.

The text encoders are in memory one after the other. Each branch of guidance has an embedding of its text in its
modulation.
"""

from __future__ import annotations

from qwenimg.common.families.hunyuan import memory, sizes
from qwenimg.common.families.hunyuan.texts import HunyuanTexts
from qwenimg.common.networks.denoisers.hunyuan_conditioning import size_row, time_row
from qwenimg.common.networks.denoisers.hunyuan_dit import PATCH, HunyuanConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline.models.flow_model import FlowRun, shapes_of
from qwenimg.common.pipeline.models.noise_model import NoiseModel
from qwenimg.common.pipeline.steps.guidance import Guidance, rescaled_cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Condition
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime


class Hunyuan(NoiseModel):
    """A Hunyuan-DiT for `Pipeline`."""

    guidance = Guidance(formula=rescaled_cfg)
    options = frozenset({"step_cache", "cached_calls", "guidance_rescale"})
    texts: HunyuanTexts
    config: HunyuanConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        super().__init__(runtime, checkpoint, residents, HunyuanTexts(residents, checkpoint))

    def nearest_size(self, width: int, height: int) -> tuple[int, int]:
        return sizes.nearest(width, height)

    def step_peak(self, tokens: int) -> int:
        return memory.step_peak(self.config, tokens)

    def step_operations(self, tokens: int, text: int) -> float:
        return memory.step_operations(self.config, tokens, text)

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid = shape.grid(PATCH)
        texts = self.texts.states([branch.prompt for branch in self.guidance.branches(request)])
        [stage] = self.steps(request, plan, shape, [self.texts.rows for _ in texts])
        transformer, _ = self.residents.acquire(stage)
        pixels = size_row(shape.rows * self.scale, shape.columns * self.scale) if self.config.sees_size else None

        def condition(branch: int) -> Condition:
            return transformer.condition(*texts[branch], grid, pixels)

        shapes = shapes_of([states for text in texts for states in text[:2]], grid)
        return self.run(request, plan, transformer, condition, lambda time: time_row(time), shapes)
