"""Transformers that predict noise, or v, at the noise levels of a diffusion model in place of a flow model's.

Text is encoded and its encoders freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since each has a condition of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.states import ModelTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun
from qwenimg.common.pipeline.steps.denoiser import phases
from qwenimg.common.pipeline.steps.plan import SamplingPlan, diffusion_plan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, DenoiserNetwork, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import discrete

PATCH = 2  # latents a side of a token


class NoiseModel(FlowModel):
    """Such a model, which was trained with pictures of a number of sizes."""

    shares_tokens = False

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, residents: Residents, texts: ModelTexts):
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.channels = self.vae.config.latent_channels

    @abstractmethod
    def nearest_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in pixels, of those that the model was trained with, that is most like a picture's."""

    @abstractmethod
    def step_peak(self, tokens: int) -> int:
        """Return the bytes of activations in one step of `tokens` tokens, but for scores."""

    @abstractmethod
    def step_operations(self, tokens: int, text: int) -> float:
        """Count the operations of one prediction for `tokens` that attend to `text` tokens too."""

    def plan(self, request: Request) -> SamplingPlan:
        self.sharing(request)  # only for its errors
        return diffusion_plan(self.schedule_config, request, self.engine.numpy)

    def warnings(self, request: Request) -> list[str]:
        lines, (width, height) = super().warnings(request), self.nearest_size(request.width, request.height)
        if (width, height) != (request.width, request.height):
            lines.append(
                f"{request.width}x{request.height} is none of the sizes that this model was trained with; of these "
                f"{width}x{height} has the nearest shape"
            )
        return lines

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        tokens = shape.count // PATCH**2
        activations = self.call_bytes(self.step_peak(tokens), tokens, max(tokens, *lengths), self.sharing(request))
        operations = (self.step_operations(tokens, length) for length in lengths)
        return [self.denoising(request, plan, activations, operations, [tokens for _ in lengths])]

    def run(
        self,
        request: Request,
        plan: SamplingPlan,
        transformer: DenoiserNetwork,
        condition: Callable[[int], Condition],
        time_step: Callable[[float], TimeStep],
        shapes: dict[str, str],
    ) -> FlowRun:
        """Return the run. condition: of a branch of guidance, by its number; time_step: of a timestep (0..999); shapes:
        for messages."""
        [segment], levels = plan.segments, self.schedule_config.levels
        time = discrete.clock(levels, segment.schedule)
        predicts = self.schedule_config.prediction_type

        def inputs(x: Array, sigma: float) -> tuple[Array, TimeStep]:
            return discrete.scalings(predicts, sigma)[0] * x, time_step(time(sigma))

        def make_pass(positions: tuple[int, ...]) -> Pass:
            return Pass(transformer, condition(positions[0]), inputs)

        def denoised(x: Array, sigma: float, prediction: Array) -> Array:
            _, c_skip, c_out = discrete.scalings(predicts, sigma)
            return c_skip * x + c_out * prediction

        made = phases(plan, self.guidance.branches(request), 1, make_pass)
        return FlowRun(self, request, made, shapes, denoised=denoised)
