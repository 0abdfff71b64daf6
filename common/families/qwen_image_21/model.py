"""Qwen-Image-2.1: text states with pictures, and the velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. The branches of guidance run in turn, since texts of different length have different positions. A
picture of the request is always a reference; below a strength of 1, and with a mask, the run starts from the first one
too. With a text encoder without its vision tower a picture is a start only.

Text and references do not depend on the step, so their keys and values are kept between the steps if memory allows;
else they are computed again in each, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image_21 import memory, references
from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.networks.denoisers import qwen21_conditioning
from qwenimg.common.networks.denoisers.qwen21_dit import SLOT, Qwen21Config
from qwenimg.common.networks.encoders import qwen
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.texts import levels
from qwenimg.common.parts.texts.picture_texts import (
    NO_LIMIT,
    VISION,
    PicturePrompt,
    PictureTemplate,
    PictureTexts,
    SeenPictures,
)
from qwenimg.common.pictures.patches import QWEN3_VL
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.models.inputs import PictureInputs, each_picture
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage

MULTIPLE = 32  # pixels: an image has whole slots of 2 x 2 tokens


def _before(pictures: int) -> str:
    """Return the text in front of a prompt with `pictures` pictures."""
    return " ".join(f"<image{i}>{VISION}" for i in range(1, pictures + 1))


REFERENCES = each_picture(
    lambda image: references.size(image), lambda image: references.values(image), lambda i: f"image{i}"
)
AROUND = PictureTemplate(
    template=Template(
        text="<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        dropped=14,  # the system's message
        limit=NO_LIMIT,
        seen=NO_LIMIT,
    ),
    before=_before,
    form=QWEN3_VL,
)


class QwenImage21(FlowModel):
    """A Qwen-Image-2.1 model for `Pipeline`."""

    multiple = MULTIPLE
    options = frozenset({"step_cache", "cached_calls"})
    shares_tokens = False
    texts: PictureTexts
    config: Qwen21Config

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents, component = Residents(runtime), checkpoint["vae"]
        halves = vae.standardized_halves(residents, component, samples=False)
        texts = PictureTexts(residents, checkpoint, AROUND, levels.alone)
        super().__init__(runtime, checkpoint, residents, texts, halves)
        self.channels = component.config.z_dim
        self.guidance = Guidance(formula=cfg, off=inf if checkpoint.distilled else 1.0)
        self.sees = texts.encoder.network != qwen.QWEN3_VL.name  # it has its vision tower
        self.inputs = PictureInputs(
            most=references.MOST if self.sees else 1,
            alpha=True,
            repeats=True,
            references=REFERENCES if self.sees else None,
        )
        self._seen = SeenPictures(references.copy)

    def plan(self, request: Request) -> SamplingPlan:
        if request.images and not self.sees and request.starts_from_noise:
            raise UsageError(
                "the text encoder has no vision tower, by which the model sees pictures: give a whole one, or its "
                "tower too (--text-encoder FILE --text-encoder mmproj.gguf), or a strength below 1, to start from "
                "the picture"
            )
        return super().plan(request)

    def prompt(self, text: str, images: Sequence[Image]) -> PicturePrompt:
        return PicturePrompt(text or " ", tuple(map(self._seen.of, images)) if self.sees else ())

    def forget(self) -> None:
        super().forget()
        self._seen.clear()

    # The transformer

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        branches, component = self.guidance.branches(request), self.checkpoint["transformer"]
        pictures = sum(one.count for one in self.reference_shapes(request))
        contexts = [length + pictures - pictures // SLOT**2 for length in lengths]
        tokens, longest = shape.count, max(contexts)
        every = tokens + longest
        score_bytes = scores(self.config.num_attention_heads, 1, every, self.engine.workspace.score_bytes)
        activations = memory.step_peak(self.config, tokens, longest) + score_bytes
        activations = self.runtime.call_bytes(component, activations)
        activations += kept_bytes(self.config.dim, [tokens] * len(branches)) if request.caches else 0
        itemsize = BYTES[self.runtime.precision.compute_dtype("transformer")]
        known = sum(memory.known_bytes(self.config, context, itemsize) for context in contexts)
        sharing = self.sharing(request)
        passes = plan.passes(branches, sharing.branches)
        anew = "with text and references computed anew in each step"
        each = (memory.step_operations(self.config, tokens, tokens + context) for context in contexts)
        once = sum(memory.step_operations(self.config, context, context) for context in contexts)
        operations = sharing.operations(plan.passes([branch]) * one for branch, one in zip(branches, each, strict=True))
        return [
            Stage(
                name="denoise",
                resident="transformer",
                component=component,
                splits=(
                    Split(activations=activations + known, size=1, passes=passes),
                    Split(activations=activations, size=1, passes=passes, about=anew),
                ),
                operations=operations + once,
            )
        ]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches, prompts = shape.grid(1), self.guidance.branches(request), self.prompts(request)
        texts, places = self.texts.states(prompts), [self.texts.places(prompt) for prompt in prompts]
        for text, there in zip(texts, places, strict=True):
            qwen21_conditioning.layout(text.shape[1], there, grid)  # only for its errors
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, split = self.residents.acquire(stage)
        dtype, timestep = self.runtime.precision.time_dtype(), self.schedule_config.timestep

        def make_phases(initial: Initial) -> list[Phase]:
            tokens = [self.engine.array(packing.tokens(latents)) for latents in initial.references]

            def make_pass(positions: tuple[int, ...]) -> Pass:
                [i] = positions
                condition = transformer.condition(texts[i], (grid, places[i], tokens), split is stage.splits[0])
                return Pass(
                    transformer,
                    condition,
                    lambda x, sigma: (x, qwen21_conditioning.time_row(timestep(sigma), dtype)),
                )

            return phases(plan, branches, 1, make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            packing=packing.patches(*grid),
        )
