"""Hunyuan-DiT: text states and v for the denoise loop.

The text encoders are in memory one after the other, and none of them while the transformer is. The branches of guidance
run in turn, since each has an embedding of its text in its modulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from qwenimg.common.families.hunyuan import memory, sizes
from qwenimg.common.families.hunyuan.texts import HunyuanTexts
from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.networks.denoisers.hunyuan_conditioning import size_row, time_row
from qwenimg.common.networks.denoisers.hunyuan_dit import PATCH, HunyuanConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.guidance import Guidance, rescaled_cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan, diffusion_plan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import discrete


class Hunyuan(FlowModel):
    """A Hunyuan-DiT for `Pipeline`: a diffusion model, whose noise levels are not those of a flow model."""

    guidance = Guidance(formula=rescaled_cfg)
    options = frozenset({"step_cache", "cached_calls", "guidance_rescale"})
    texts: HunyuanTexts
    config: HunyuanConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts = HunyuanTexts(residents, checkpoint)
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels

    @property
    def heads(self) -> int:
        """Zero: ranks share its branches of guidance only."""
        return 0

    def plan(self, request: Request) -> SamplingPlan:
        self.sharing(request)  # only for its errors
        return diffusion_plan(self.schedule_config, request, self.engine.numpy)

    def warnings(self, request: Request) -> list[str]:
        width, height = sizes.nearest(request.width, request.height)
        lines = super().warnings(request)
        if (width, height) != (request.width, request.height):
            lines.append(
                f"{request.width}x{request.height} is none of the sizes that this model was trained with; of these "
                f"{width}x{height} has the nearest shape"
            )
        return lines

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing = self.guidance.branches(request), self.sharing(request)
        tokens, longest = shape.count // PATCH**2, max(lengths)
        peak = memory.step_peak(self.config, tokens)
        peak += scores(self.config.num_attention_heads, 1, max(tokens, longest), self.engine.workspace.score_bytes)
        activations = self.runtime.call_bytes(self.checkpoint["transformer"], peak)
        activations += kept_bytes(self.config.dim, [tokens for _ in lengths]) if request.caches else 0
        operations = (memory.step_operations(self.config, tokens, length) for length in lengths)
        return [self.denoising(plan, branches, sharing, activations, operations)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        [stage] = self.steps(request, plan, shape, [self.texts.rows for _ in texts])
        transformer, _ = self.residents.acquire(stage)
        [segment], levels = plan.segments, self.schedule_config.levels
        time = discrete.clock(levels, segment.schedule)
        predicts = self.schedule_config.prediction_type
        pixels = size_row(shape.rows * self.scale, shape.columns * self.scale) if self.config.sees_size else None

        def inputs(x: Array, sigma: float) -> tuple[Array, TimeStep]:
            return discrete.scalings(predicts, sigma)[0] * x, time_row(time(sigma))

        def make_pass(positions: tuple[int, ...]) -> Pass:
            return Pass(transformer, transformer.condition(*texts[positions[0]], grid, pixels), inputs)

        def denoised(x: Array, sigma: float, prediction: Array) -> Array:
            _, c_skip, c_out = discrete.scalings(predicts, sigma)
            return c_skip * x + c_out * prediction

        shapes = shapes_of([states for text in texts for states in text[:2]], grid)
        return FlowRun(self, request, phases(plan, branches, 1, make_pass), shapes, denoised=denoised)
