"""AuraFlow: text states, modulation, and the prediction for the denoise loop.

The text encoder is freed before the transformer is loaded, and so are the weights that only make its modulation, a
third of it. The branches of guidance run in turn; the modulation of both is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.auraflow import memory
from qwenimg.common.families.auraflow.texts import AuraTexts
from qwenimg.common.networks.denoisers.aura_conditioning import time_rows, window
from qwenimg.common.networks.denoisers.aura_dit import PATCH, REGISTERS, AuraConfig
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling.flow_match import SHIFTED_TWICE


class AuraFlow(FlowModel):
    """A model of AuraFlow's form for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    levels = SHIFTED_TWICE
    options = frozenset({"step_cache", "cached_calls"})
    texts: AuraTexts
    config: AuraConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = AuraTexts(residents, checkpoint)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels

    def plan(self, request: Request) -> SamplingPlan:
        width, height = sizes.render_size(request.width, request.height, MULTIPLE)
        window(self.config, height // MULTIPLE, width // MULTIPLE)
        return super().plan(request)

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps."""
        sharing = self.sharing(request)
        tokens, text = shape.count // PATCH**2, max(lengths) + REGISTERS
        peak = memory.step_peak(self.config, sharing.part(tokens) + text)
        activations = self.call_bytes(peak, tokens, tokens + text, sharing)
        operations = [memory.step_operations(self.config, tokens + text)] * len(lengths)
        denoise = self.denoising(request, plan, activations, operations, [tokens] * len(lengths))
        if self.modulations.has(timesteps := self.timesteps(plan)):
            return [denoise]
        rows = memory.modulation_rows(self.config, self.runtime.load_plan(denoise.component), len(timesteps))
        block = "joint_transformer_blocks.0."
        return [self.modulations.stage(denoise.component, rows, block, [denoise.splits[0].activations]), denoise]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        texts = self.texts.states(self.prompts(request))
        stages = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        timesteps = self.timesteps(plan)
        modulation, _ = self.modulations.get(
            timesteps, stages[0], lambda transformer, _: transformer.modulate(time_rows(timesteps))
        )
        transformer, _ = self.residents.acquire(stages[-1])
        rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, (modulation, rows[sigma])))

        return FlowRun(self, request, phases(plan, branches, 1, make_pass), shapes_of(texts, grid))
