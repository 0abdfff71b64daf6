"""PixArt: text states and the noise for the denoise loop."""

from __future__ import annotations

from qwenimg.common.families.pixart import sizes
from qwenimg.common.families.pixart.checkpoint import T5
from qwenimg.common.families.pixart.known import ALPHA, LENGTHS
from qwenimg.common.families.pixart.texts import PixArtTexts
from qwenimg.common.networks.denoisers.pixart_conditioning import size_rows, time_row
from qwenimg.common.networks.denoisers.pixart_dit import PATCH, PixArtConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import cross_blocks
from qwenimg.common.pipeline.models.flow_model import FlowRun, shapes_of
from qwenimg.common.pipeline.models.noise_model import NoiseModel
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.few_steps import FewSteps
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Condition
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime

DMD = {"dmd": FewSteps(steps=(1,), sampler="lcm", schedule="dmd")}
"""For the transformer of PixArt-DMD, made of PixArt-alpha for 512 pixels, given as the model itself."""


class PixArt(NoiseModel):
    """A PixArt model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    options = frozenset({"step_cache", "cached_calls"})
    texts: PixArtTexts
    config: PixArtConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = PixArtTexts(residents, checkpoint, T5, LENGTHS[checkpoint.variant])
        super().__init__(runtime, checkpoint, residents, texts)
        self.few_steps = DMD if checkpoint.variant == ALPHA else {}

    def nearest_size(self, width: int, height: int) -> tuple[int, int]:
        return sizes.nearest(self.config.sample_size * self.scale, width, height)

    def step_peak(self, tokens: int) -> int:
        return cross_blocks.step_peak(self.config, tokens)

    def step_operations(self, tokens: int, text: int) -> float:
        return cross_blocks.step_operations(self.config, tokens, text, keeps=False)

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid = shape.grid(PATCH)
        texts = self.texts.states([branch.prompt for branch in self.guidance.branches(request)])
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        pixels = size_rows(shape.rows * self.scale, shape.columns * self.scale) if self.config.sees_size else None

        def condition(branch: int) -> Condition:
            return transformer.condition(texts[branch], grid, pixels)

        return self.run(request, plan, transformer, condition, lambda time: time_row(time), shapes_of(texts, grid))
