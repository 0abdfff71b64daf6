"""Krea 2: text states and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since texts have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from qwenimg.common.families.krea2 import memory
from qwenimg.common.families.krea2.texts import TEMPLATE
from qwenimg.common.memory.memory import kept_bytes
from qwenimg.common.networks.denoisers.krea2_conditioning import time_row
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage

PATCH = 2  # latents a side of a token


def from_prompt(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply guidance from the prompt's prediction on, as the model's card counts it: a scale of 0 is none."""
    conditional, unconditional = predictions
    return conditional + request.guidance * (conditional - unconditional)


class Krea2(FlowModel):
    """A Krea 2 model for `Pipeline`."""

    options = frozenset({"step_cache", "cached_calls"})
    texts: TemplateTexts
    config: Krea2Config

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        halves = vae.standardized_halves(residents, checkpoint["vae"])
        super().__init__(runtime, checkpoint, residents, TemplateTexts(residents, checkpoint, TEMPLATE), halves)
        self.channels = self.config.in_channels // PATCH**2
        self.guidance = Guidance(formula=from_prompt, off=inf if checkpoint.distilled else 0.0)

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing, tokens = self.guidance.branches(request), self.sharing(request), shape.count // PATCH**2
        counts = [tokens + length for length in lengths]
        peak = memory.step_peak(self.config, sharing.part(tokens) + max(lengths), max(lengths))
        activations = self.call_bytes(peak, tokens, max(counts), sharing)
        activations += kept_bytes(self.config.dim, counts) if request.caches else 0
        operations = (memory.step_operations(self.config, count) for count in counts)
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

        return FlowRun(
            self,
            request,
            phases(plan, branches, 1, make_pass),
            shapes_of(texts, grid),
            pack=packing.pack,
            unpack=lambda x: packing.unpack(x, shape.rows, shape.columns),
        )
