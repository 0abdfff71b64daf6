"""Lumina-Image 2.0: text states and the prediction for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since the image's frame is the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.lumina import memory
from qwenimg.common.families.lumina.texts import TEXT, instructed
from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.networks.denoisers.lumina_conditioning import time_row
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg, cfg_with_norm
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
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
    texts: TemplateTexts
    config: LuminaConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = TemplateTexts(residents, checkpoint, TEXT)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels

    @property
    def heads(self) -> int:
        """Zero: ranks share its branches of guidance only."""
        return 0

    def prompt(self, text: str, images: Sequence[Image]) -> str:
        """Return the prompt behind the instruction."""
        return instructed(text)

    def prompts(self, request: Request) -> list[str]:
        """Return the texts of the branches; a negative prompt has no instruction."""
        first, *others = (branch.prompt for branch in self.guidance.branches(request))
        return [instructed(first), *others]

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing, tokens = self.guidance.branches(request), self.sharing(request), shape.count // PATCH**2
        counts = [tokens + length for length in lengths]
        peak = memory.block_peak(self.config, max(counts))
        peak += scores(self.config.n_heads, 1, max(counts), self.engine.workspace.score_bytes)
        activations = self.runtime.call_bytes(self.checkpoint["transformer"], peak)
        activations += kept_bytes(self.config.dim, counts) if request.caches else 0
        operations = (memory.step_operations(self.config, count) for count in counts)
        return [self.denoising(plan, branches, sharing, activations, operations)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        texts = self.texts.states(self.prompts(request))
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        timestep = self.schedule_config.timestep

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, time_row(timestep(sigma))))

        return FlowRun(
            self,
            request,
            phases(plan, branches, 1, make_pass),
            shapes_of(texts, grid),
            denoised=lambda x, sigma, prediction: x + sigma * prediction,  # it predicts latents - noise
        )
