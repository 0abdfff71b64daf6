"""Flux.2: its shift of noise levels, references, and the times of a step for the denoise loop. dev is
guidance-distilled: its scale is an input, and a negative prompt needs a second prediction (`true_cfg`).

References of klein KV do not depend on the step, so their keys and values are kept between the steps if memory allows;
else they are computed again in each, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qwenimg.common.families.flux2 import memory, references, texts
from qwenimg.common.networks.denoisers.flux2_conditioning import time_rows
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.pipeline.models.inputs import BlendedMask, PictureInputs, each_picture
from qwenimg.common.pipeline.models.patch_model import Images, PatchModel
from qwenimg.common.pipeline.steps.guidance import TRUE_CFG
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, NumpyArray
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.sampling.flow_match import FlowLevels, FlowMatchConfig

LARGE = 4300  # image tokens; above it the shift does not depend on the steps


def shift(config: FlowMatchConfig, tokens: int, steps: int) -> float:
    """Return the shift of the noise levels, fitted by the model's authors: a line in the steps through those at 10 and
    at 200 of them, each a line in the image tokens; that at 200 for large images."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > LARGE:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * steps + (at_200 - 200.0 * slope)


class Flux2(PatchModel):
    """A Flux.2 model for `Pipeline`."""

    inputs = PictureInputs(
        most=references.MOST,
        mask=BlendedMask(soft=True),
        references=each_picture(lambda image: references.size(*image.shape[1::-1]), references.values),
    )
    levels = FlowLevels(mu=shift)
    template, shares_references = texts.KLEIN, True
    config: Flux2Config

    def step_peak(self, tokens: int) -> int:
        return memory.step_peak(self.config, tokens)

    def step_operations(self, image: int, text: int, references: int) -> float:
        tokens = image + text + references
        return memory.step_operations(self.config, tokens, tokens)

    def time_rows(self, request: Request, plan: SamplingPlan, sigma: float, dtype: TimeDtype) -> NumpyArray:
        guidance = request.guidance if self.config.guidance_embeds else None
        return time_rows(self.config, self.schedule_config.timestep(sigma), dtype, guidance)


class Flux2Dev(Flux2):
    """FLUX.2 dev for `Pipeline`."""

    template = texts.DEV

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        super().__init__(runtime, checkpoint)
        self.guidance = TRUE_CFG


class Flux2KV(Flux2):
    """FLUX.2 klein KV for `Pipeline`."""

    shares_tokens = False

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        image, count = shape.count, len(lengths)
        seen = sum(one.count for one in self.reference_shapes(request))
        tokens = image + max(lengths)
        peak = memory.kept_peak(self.config, tokens, seen)
        activations = self.call_bytes(peak, tokens, tokens + seen, self.sharing(request))
        each = (memory.step_operations(self.config, image + length, image + length + seen) for length in lengths)
        stage = self.denoising(request, plan, activations, each, [image] * count)
        if not seen:
            return [stage]
        known = memory.known_bytes(self.config, seen, self.runtime.precision.compute_dtype("transformer"))
        [anew] = stage.splits
        splits = (
            replace(anew, activations=anew.activations + count * known),
            replace(anew, about="with references computed anew in each step"),
        )
        once = count * memory.step_operations(self.config, seen, seen)
        return [replace(stage, splits=splits, operations=stage.operations + once)]

    def condition(self, transformer: Any, text: Array, images: Images, split: Split) -> Condition:
        return transformer.condition(text, images, not split.about)
