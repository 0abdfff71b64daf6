"""SANA and SANA-Sprint: text states and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. SANA-Sprint's steps are those of its trigonometric flow, which is a flow model's in other units
(`common/sampling/flow_solvers.py`), with fresh noise in each; guidance is an input there.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.sana import memory
from qwenimg.common.families.sana.texts import SanaTexts, instructed, plain
from qwenimg.common.networks.denoisers.sana_conditioning import time_rows
from qwenimg.common.networks.denoisers.sana_dit import SanaConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import cross_blocks, dc_vae
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.steps.guidance import TRUE_CFG, Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import flow_solvers


class Sana(FlowModel):
    """A SANA model for `Pipeline`."""

    options = frozenset({"step_cache", "cached_calls"})
    shares_tokens = False
    texts: SanaTexts
    config: SanaConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        halves = dc_vae.halves(residents, checkpoint["vae"])
        super().__init__(runtime, checkpoint, residents, SanaTexts(residents, checkpoint), halves)
        self.multiple = self.token = self.scale
        self.channels = self.config.in_channels
        self.guidance = TRUE_CFG if self.config.guidance_embeds else Guidance(formula=cfg)
        self.levels = flow_solvers.levels(self.schedule_config)

    def prompt(self, text: str, images: Sequence[Image]) -> str:
        """Return the prompt behind the instruction."""
        return instructed(text)

    def prompts(self, request: Request) -> list[str]:
        """Return the texts of the branches; a negative prompt has no instruction."""
        first, *others = (branch.prompt for branch in self.guidance.branches(request))
        return [instructed(first), *map(plain, others)]

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        tokens, compute = shape.count, self.runtime.precision.compute_dtype("transformer")
        peak = memory.step_peak(self.config, tokens)
        heads, most = self.config.num_cross_attention_heads, self.engine.workspace.score_bytes
        peak += min(most, 4 * heads * tokens * max(lengths))
        activations = self.runtime.call_bytes(self.checkpoint["transformer"], peak)
        activations += cross_blocks.context_bytes(self.config.num_layers, self.config.cross_dim, sum(lengths), compute)
        operations = (memory.step_operations(self.config, tokens, length) for length in lengths)
        return [self.denoising(request, plan, activations, operations, [tokens for _ in lengths])]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        guidance = request.guidance
        return self.text_run(request, plan, shape, 1, lambda time: time_rows(self.config, time, guidance), learns=True)
