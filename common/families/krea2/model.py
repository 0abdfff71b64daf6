"""Krea 2: text states and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since texts have different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from qwenimg.common.families.krea2 import memory
from qwenimg.common.families.krea2.texts import TEMPLATE
from qwenimg.common.networks.denoisers.krea2_conditioning import time_row
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.steps.guidance import Guidance
from qwenimg.common.pipeline.steps.plan import SamplingPlan
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
        sharing, tokens = self.sharing(request), shape.count // PATCH**2
        counts = [tokens + length for length in lengths]
        peak = memory.step_peak(self.config, sharing.part(tokens) + max(lengths), max(lengths))
        activations = self.call_bytes(peak, tokens, max(counts), sharing)
        operations = (memory.step_operations(self.config, count) for count in counts)
        return [self.denoising(request, plan, activations, operations, counts)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        dtype = self.runtime.precision.time_dtype()
        return self.text_run(
            request,
            plan,
            shape,
            PATCH,
            lambda time: time_row(self.config, time, dtype),
            packing=packing.squares(shape.rows, shape.columns),
        )
