"""SANA and SANA-Sprint: text states and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. SANA-Sprint's steps are those of its trigonometric flow, which is a flow model's in other units
(`common/sampling/flow_solvers.py`), with fresh noise in each; guidance is an input there.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.sana import memory
from qwenimg.common.families.sana.texts import SanaTexts, instructed, plain
from qwenimg.common.memory.memory import kept_bytes
from qwenimg.common.networks.denoisers.sana_conditioning import time_rows
from qwenimg.common.networks.denoisers.sana_dit import SanaConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import dc_vae
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import TRUE_CFG, Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import flow_solvers


class Sana(FlowModel):
    """A SANA model for `Pipeline`."""

    options = frozenset({"step_cache", "cached_calls"})
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
        return [instructed(first), *map(plain, others)]

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing, tokens = self.guidance.branches(request), self.sharing(request), shape.count
        peak = memory.step_peak(self.config, tokens)
        heads, most = self.config.num_cross_attention_heads, self.engine.workspace.score_bytes
        peak += min(most, 4 * heads * tokens * max(lengths))
        activations = self.runtime.call_bytes(self.checkpoint["transformer"], peak)
        compute = self.runtime.precision.compute_dtype("transformer")
        activations += sum(memory.context_bytes(self.config, length, compute) for length in lengths)
        activations += kept_bytes(self.config.dim, [tokens for _ in lengths]) if request.caches else 0
        operations = (memory.step_operations(self.config, tokens, length) for length in lengths)
        return [self.denoising(plan, branches, sharing, activations, operations)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(1), self.guidance.branches(request)
        texts = self.texts.states(self.prompts(request))
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        timestep, guidance = self.schedule_config.timestep, request.guidance

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, time_rows(self.config, timestep(sigma), guidance)))

        # Made anew in training, where keys and values learn too
        return ReferenceRun(self, request, lambda initial: phases(plan, branches, 1, make_pass), shapes_of(texts, grid))
