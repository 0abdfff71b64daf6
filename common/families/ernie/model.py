"""ERNIE-Image: text states and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since an image's position is the length of its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.ernie import memory
from qwenimg.common.families.ernie.texts import PROMPT
from qwenimg.common.networks.denoisers.ernie_conditioning import time_row
from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.models.inputs import BlendedMask, PictureInputs
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage


class Ernie(FlowModel):
    """An ERNIE-Image model for `Pipeline`."""

    options = frozenset({"step_cache", "cached_calls"})
    guidance = Guidance(formula=cfg)
    inputs = PictureInputs(mask=BlendedMask(soft=True))
    texts: TemplateTexts
    config: ErnieConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = TemplateTexts(residents, checkpoint, PROMPT)
        super().__init__(runtime, checkpoint, residents, texts, vae.patched_halves(residents, checkpoint["vae"]))
        self.channels = self.config.in_channels

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        sharing, tokens = self.sharing(request), shape.count
        counts = [tokens + length for length in lengths]
        peak = memory.step_peak(self.config, max(lengths) + sharing.part(tokens))
        activations = self.call_bytes(peak, tokens, max(counts), sharing)
        operations = (memory.step_operations(self.config, count) for count in counts)
        return [self.denoising(request, plan, activations, operations, counts)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        return self.text_run(
            request,
            plan,
            shape,
            1,
            lambda time: time_row(self.config, time),
            packing=packing.patches(*shape.grid(1)),
        )
