"""Anima: text and the velocity for the denoise loop.

Texts are encoded and their networks freed before the transformer is loaded, so the peak of memory is the largest
component and not the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.anima.texts import AnimaTexts
from qwenimg.common.networks.denoisers.anima_conditioning import time_row
from qwenimg.common.networks.denoisers.anima_dit import PATCH, AnimaConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import cross_blocks, vae
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage


class Anima(FlowModel):
    """An Anima model for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    shares_tokens = False
    options = frozenset({"step_cache", "cached_calls"})
    texts: AnimaTexts
    config: AnimaConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        halves = vae.standardized_halves(residents, checkpoint["vae"], samples=False)
        super().__init__(runtime, checkpoint, residents, AnimaTexts(residents, checkpoint), halves)
        self.channels = self.config.in_channels

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        tokens, compute = shape.count // PATCH**2, self.runtime.precision.compute_dtype("transformer")
        peak = cross_blocks.step_peak(self.config, tokens)
        activations = self.call_bytes(peak, tokens, max(tokens, *lengths), self.sharing(request))
        activations += cross_blocks.context_bytes(self.config.num_layers, self.config.dim, sum(lengths), compute)
        operations = (cross_blocks.step_operations(self.config, tokens, length, keeps=True) for length in lengths)
        return [self.denoising(request, plan, activations, operations, [tokens for _ in lengths])]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        dtype = self.runtime.precision.time_dtype()
        return self.text_run(
            request,
            plan,
            shape,
            PATCH,
            lambda time: time_row(self.config, time, dtype),
            packing=packing.squares(shape.rows, shape.columns),
            learns=True,
        )
