"""Lumina-Image 2.0: text states and the prediction for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since the image's frame is the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.lumina import memory
from qwenimg.common.families.lumina.texts import TEXT, instructed
from qwenimg.common.networks.denoisers.lumina_conditioning import time_row
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg, cfg_with_norm
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage


def _guided(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance in which each row of a channel of latents [1 C h w] keeps the norm of the prompt's
    prediction, as its pipeline does; or the whole at most a multiple of it, as its authors' code and ComfyUI do."""
    most = request.family_options.cfg_normalization
    if not most:
        return cfg_with_norm(engine, request, predictions)
    return engine.shortened(cfg(engine, request, predictions), predictions[0], most)


class Lumina(FlowModel):
    """A model of Lumina-Image 2.0's form for `Pipeline`."""

    guidance = Guidance(formula=_guided)
    options = frozenset({"step_cache", "cached_calls", "cfg_normalization"})
    shares_tokens = False
    texts: TemplateTexts
    config: LuminaConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = TemplateTexts(residents, checkpoint, TEXT)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels

    def prompt(self, text: str, images: Sequence[Image]) -> str:
        """Return the prompt behind the instruction."""
        return instructed(text)

    def prompts(self, request: Request) -> list[str]:
        """Return the texts of the branches; a negative prompt has no instruction."""
        first, *others = (branch.prompt for branch in self.guidance.branches(request))
        return [instructed(first), *others]

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        tokens = shape.count // PATCH**2
        counts = [tokens + length for length in lengths]
        peak = memory.block_peak(self.config, max(counts))
        activations = self.call_bytes(peak, tokens, max(counts), self.sharing(request))
        operations = (memory.step_operations(self.config, count) for count in counts)
        return [self.denoising(request, plan, activations, operations, counts)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        return self.text_run(
            request,
            plan,
            shape,
            PATCH,
            time_row,
            denoised=lambda x, sigma, prediction: x + sigma * prediction,  # it predicts latents - noise
        )
