"""Flow-match models over the patches of FLUX.2's VAE.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. An image of the request is always a reference, which the transformer sees as tokens of their own; below
a strength of 1, and with a mask, the run starts from it too. Guidance is another prediction, or distilled; the branches
run in turn, and the modulation is made in every step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar, TypeAlias

from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts.template_texts import TemplateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, NumpyArray, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage

Images: TypeAlias = tuple[Sequence[tuple[int, int]], Sequence[Array]]
"""Rows and columns in tokens of the image and of each reference, and the packed latents of the references."""


class PatchModel(FlowModel):
    """Such a model."""

    options = frozenset({"step_cache", "cached_calls"})
    template: ClassVar[Template]  # of the prompt
    shares_references: ClassVar[bool]  # whether several devices divide the tokens of references too
    texts: TemplateTexts

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        texts, halves = (
            TemplateTexts(residents, checkpoint, self.template),
            vae.patched_halves(residents, checkpoint["vae"]),
        )
        super().__init__(runtime, checkpoint, residents, texts, halves)
        self.channels = self.config.in_channels
        self.guidance = Guidance(formula=cfg, off=inf if checkpoint.distilled else 1.0)

    @abstractmethod
    def step_peak(self, tokens: int) -> int:
        """Return the bytes of activations in one step of `tokens` image, reference and text tokens."""

    @abstractmethod
    def step_operations(self, image: int, text: int, references: int) -> float:
        """Count the operations of one prediction for so many tokens of each stream."""

    @abstractmethod
    def time_rows(self, request: Request, plan: SamplingPlan, sigma: float, dtype: TimeDtype) -> NumpyArray:
        """Return the sinusoids of a prediction at the noise level `sigma`."""

    def condition(self, transformer: Any, text: Array, images: Images, split: Split) -> Condition:
        """Return the condition of a branch for text states and `images`, in the stage's `split`."""
        return transformer.condition(text, images)

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        sharing = self.sharing(request)
        image, seen = shape.count, sum(one.count for one in self.reference_shapes(request))
        shared, others = (image + seen, 0) if self.shares_references else (image, seen)
        peak = self.step_peak(max(lengths) + others + sharing.part(shared))
        activations = self.call_bytes(peak, shared, max(lengths) + image + seen, sharing)
        operations = (self.step_operations(image, length, seen) for length in lengths)
        return [self.denoising(request, plan, activations, operations, [shared] * len(lengths))]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(1), self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, split = self.residents.acquire(stage)
        dtype = self.runtime.precision.time_dtype()

        def inputs(x: Array, sigma: float) -> tuple[Array, TimeStep]:
            return x, self.time_rows(request, plan, sigma, dtype)

        def make_phases(initial: Initial) -> list[Phase]:
            grids = [grid, *((latents.shape[2], latents.shape[3]) for latents in initial.references)]
            tokens = [self.engine.array(packing.tokens(latents)) for latents in initial.references]

            def make_pass(positions: tuple[int, ...]) -> Pass:
                text = texts[positions[0]]
                return Pass(transformer, self.condition(transformer, text, (grids, tokens), split), inputs)

            return phases(plan, branches, 1, make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            packing=packing.patches(*grid),
        )
