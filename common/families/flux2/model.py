"""Flux.2 klein: text states, reference images and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. An image of the request is always a reference, which the transformer sees as tokens of their own; below
a strength of 1, and with a mask, the run starts from it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from qwenimg.common.families.flux2 import memory, references
from qwenimg.common.memory.memory import kept_bytes
from qwenimg.common.networks.denoisers.flux2_conditioning import time_rows
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.vaes.flux2_vae import PATCH
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import tiny_vae, vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.models.inputs import BlendedMask, PictureInputs, each_picture
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling.flow_match import FlowLevels, FlowMatchConfig

TEMPLATE = Template(
    text="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    dropped=0,
    limit=512,
    seen=512,
    pad="<|endoftext|>",
)
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


class Flux2(FlowModel):
    """A Flux.2 model for `Pipeline`."""

    options = frozenset({"step_cache", "cached_calls"})
    inputs = PictureInputs(
        most=references.MOST,
        mask=BlendedMask(soft=True),
        references=each_picture(lambda image: references.size(*image.shape[1::-1]), references.values),
    )
    levels = FlowLevels(mu=shift)
    texts: TemplateTexts
    config: Flux2Config

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents, component = Residents(runtime), checkpoint["vae"]
        halves = (
            vae.TinyHalves(residents, component)
            if tiny_vae.is_tiny(component)
            else VAEHalves(
                residents,
                component,
                component.config.block_out_channels[0],
                vae.scaled(1.0, 0.0),  # the network has its statistics
                patch=PATCH,
                samples=False,
            )
        )
        super().__init__(runtime, checkpoint, residents, TemplateTexts(residents, checkpoint, TEMPLATE), halves)
        self.channels = self.config.in_channels
        self.guidance = Guidance(formula=cfg, off=inf if checkpoint.distilled else 1.0)

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, sharing = self.guidance.branches(request), self.sharing(request)
        tokens = sum(one.count for one in [shape, *self.reference_shapes(request)])
        counts = [tokens + length for length in lengths]
        peak = memory.step_peak(self.config, max(lengths) + sharing.part(tokens))
        activations = self.call_bytes(peak, tokens, max(counts), sharing)
        activations += kept_bytes(self.config.dim, [tokens] * len(branches)) if request.caches else 0
        operations = (memory.step_operations(self.config, count) for count in counts)
        return [self.denoising(plan, branches, sharing, activations, operations)]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(1), self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        dtype, timestep = self.runtime.precision.time_dtype(), self.schedule_config.timestep

        def make_phases(initial: Initial) -> list[Phase]:
            grids = [grid, *((latents.shape[2], latents.shape[3]) for latents in initial.references)]
            tokens = [self.engine.array(packing.tokens(latents)) for latents in initial.references]

            def make_pass(positions: tuple[int, ...]) -> Pass:
                condition = transformer.condition(texts[positions[0]], (grids, tokens))
                return Pass(
                    transformer, condition, lambda x, sigma: (x, time_rows(self.config, timestep(sigma), dtype))
                )

            return phases(plan, branches, 1, make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            pack=packing.tokens,
            unpack=lambda x: packing.image(x, *grid),
        )
