"""Anima: text and the velocity for the denoise loop.

Texts are encoded and their networks freed before the transformer is loaded, so the peak of memory is the largest
component and not the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.anima import memory
from qwenimg.common.families.anima.texts import AnimaTexts
from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.networks.denoisers.anima_conditioning import time_row
from qwenimg.common.networks.denoisers.anima_dit import PATCH, AnimaConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage


class Anima(FlowModel):
    """An Anima model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    options = frozenset({"step_cache", "cached_calls"})
    texts: AnimaTexts
    config: AnimaConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        halves = vae.standardized_halves(residents, checkpoint["vae"], samples=False)
        super().__init__(runtime, checkpoint, residents, AnimaTexts(residents, checkpoint), halves)
        self.channels = self.config.in_channels

    @property
    def heads(self) -> int:
        """Zero: ranks share its branches of guidance only."""
        return 0

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing = self.guidance.branches(request), self.sharing(request)
        tokens, longest = shape.count // PATCH**2, max(lengths)
        peak = memory.step_peak(self.config, tokens)
        peak += scores(self.config.num_attention_heads, 1, max(tokens, longest), self.engine.workspace.score_bytes)
        activations = self.runtime.call_bytes(self.checkpoint["transformer"], peak)
        compute = self.runtime.precision.compute_dtype("transformer")
        activations += sum(memory.context_bytes(self.config, length, compute) for length in lengths)
        activations += kept_bytes(self.config.dim, [tokens for _ in lengths]) if request.caches else 0
        operations = (memory.step_operations(self.config, tokens, length) for length in lengths)
        return [self.denoising(plan, branches, sharing, activations, operations)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        dtype, timestep = self.runtime.precision.time_dtype(), self.schedule_config.timestep

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, time_row(self.config, timestep(sigma), dtype)))

        return ReferenceRun(
            self,
            request,
            lambda initial: phases(plan, branches, 1, make_pass),  # in training, keys and values learn too
            shapes_of(texts, grid),
            pack=packing.pack,
            unpack=lambda x: packing.unpack(x, shape.rows, shape.columns),
        )
