"""The common code of flow-match models with one transformer: sampling, stages, LoRAs, and the run of one image.

A family defines the stages of its transformer (`steps`), and `start`: it encodes the texts, opens the transformer and
returns a `FlowRun`. The transformer's configuration has its width as `dim`, and its heads as `num_attention_heads`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import isinf
from typing import Any, ClassVar, TypeAlias

import numpy as np

from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.numbers import sizes
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.packing import AS_IMAGES, Packing
from qwenimg.common.parts.modulations import Modulations
from qwenimg.common.parts.texts.states import ModelTexts
from qwenimg.common.parts.vae import VAEHalves
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel, Image
from qwenimg.common.pipeline.steps import inpaint
from qwenimg.common.pipeline.steps.denoiser import Denoiser, Phase, phases
from qwenimg.common.pipeline.steps.evaluation import Evaluate, serial, strategy
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment, flow_plan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts import web_syntax
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Control, TimeStep
from qwenimg.common.runtime.group import Sharing
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.sampling.flow_match import USUAL
from qwenimg.common.weights.loras.lora import Deltas

TOKEN = 16  # pixels along a side of an image's token, in most families
Denoised: TypeAlias = Callable[[Array, float, Array], Array]
Controlling: TypeAlias = Callable[[Array, float], Control]


def _from_velocity(x: Array, sigma: float, velocity: Array) -> Array:
    """Return the denoised latents for a model that predicts noise - latents."""
    return x - sigma * velocity


class FlowModel(DiffusionModel):
    """A flow-match model for `Pipeline`; `DiffusionModel` explains the methods."""

    levels = USUAL  # of noise
    token = TOKEN
    shares_tokens = True  # False: ranks share its branches of guidance alone

    def __init__(
        self, runtime: Runtime, checkpoint: Checkpoint, residents: Residents, texts: ModelTexts, vae: VAEHalves
    ):
        super().__init__(runtime, checkpoint, residents, vae)
        self.texts, self.modulations = texts, Modulations(residents)
        self.schedule_config = checkpoint.scheduler
        self.config: Any = checkpoint["transformer"].config

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads) if self.shares_tokens else 0

    @abstractmethod
    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the transformer, for latents of `shape` and texts of `lengths` tokens, one for each
        branch of guidance."""

    @abstractmethod
    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        """Encode the texts, open the transformer, and return the run for latents of `shape`."""

    def plan(self, request: Request) -> SamplingPlan:
        self.reference_shapes(request)  # only for its errors
        self.sharing(request)  # likewise
        width, height = sizes.render_size(request.width, request.height, self.multiple)
        return flow_plan(self.schedule_config, request, width * height // self.token**2, self.levels)

    def warnings(self, request: Request) -> list[str]:
        named = zip(("prompt", "negative prompt"), self.prompts(request), strict=False)
        cuts = [(name, self.texts.cut(prompt)) for name, prompt in named]
        lines = [f"the {name} is cut: {cut}" for name, cut in cuts if cut]
        lines += web_syntax.warnings(branch.prompt for branch in self.guidance.branches(request))
        if isinf(self.guidance.off) and request.guidance > 1:
            lines.append("guidance has no effect: this model is distilled to draw without it")
        return lines

    # Pictures

    def reference_shapes(self, request: Request) -> list[LatentShape]:
        """Return the shape of the latents of each picture that the model sees. Raises UsageError."""
        sizes = self.inputs.sizes(request)
        return [LatentShape(1, height // self.scale, width // self.scale) for width, height in sizes]

    def encoded(self, request: Request, shape: LatentShape) -> list[LatentShape]:
        """Return the shape of the latents of each picture that is encoded, an empty one for a mask included."""
        references = self.reference_shapes(request)
        controls = [shape for one in request.controls if self.nets[one.network].picture != "text"]
        controls += [shape for one in request.controls if self.nets[one.network].fills and request.mask is not None]
        starts_from_image = request.encodes_start and not (references and request.starts_from_noise)
        empty = self.inputs.mask.is_input and request.mask is None
        return [*controls, *references, *([shape] if starts_from_image else []), *([shape] if empty else [])]

    def prompt(self, text: str, images: Sequence[Image]) -> Hashable:
        """Return the key of the states of a prompt in a request with `images`."""
        return text

    def prompts(self, request: Request) -> list[Any]:
        """Return the keys of the states of the branches' prompts."""
        return [self.prompt(branch.prompt, request.images) for branch in self.guidance.branches(request)]

    # A prompt that the model writes itself

    def writing(self, request: Request) -> list[Stage]:
        """Return the stages in which the model writes the prompt of `request`."""
        return []

    # A run

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        return [
            *(self.vae.encoding(one) for one in self.encoded(request, shape)),
            *self.writing(request),
            *self.encodings(request, counted),
            *self.steps(request, plan, shape, self.lengths(request, counted)),
            self.vae.decoding(shape),
        ]

    def encodings(self, request: Request, counted: bool) -> list[Stage]:
        """Return the stages that make the text states of a request."""
        prompts = self.prompts(request)
        return [] if self.texts.has(prompts) else self.texts.encodings(prompts, counted)

    def lengths(self, request: Request, counted: bool) -> list[int]:
        """Return the number of text tokens of each branch."""
        return self.texts.lengths(self.prompts(request), counted)

    def timesteps(self, plan: SamplingPlan) -> tuple[float, ...]:
        """Return the timesteps of the transformer's evaluations, in their order."""
        return tuple(self.schedule_config.timestep(sigma) for sigma in plan.evaluated_sigmas())

    def call_bytes(self, peak: int, tokens: int, longest: int, sharing: Sharing, branches: int = 1) -> int:
        """Return the bytes of a step's activations with `branches` in one batch: `peak` bytes, the scores of attention
        over `longest` tokens, and what ranks exchange for the `tokens` of images."""
        heads = int(self.config.num_attention_heads) // sharing.tokens
        score_bytes = scores(heads, branches, longest, self.engine.workspace.score_bytes)
        exchanged = sharing.exchanged(self.config.dim, tokens)
        return self.runtime.call_bytes(self.checkpoint["transformer"], peak + score_bytes + exchanged)

    def denoising(
        self,
        request: Request,
        plan: SamplingPlan,
        activations: int,
        operations: Iterable[float],
        streams: Sequence[int],
        co_resident: frozenset[str] = frozenset(),
    ) -> Stage:
        """Return the stage of all steps, one branch after the other, with `activations` bytes at a time and what a step
        cache keeps. operations: of one evaluation, for each branch; streams: the tokens of the stream that the blocks
        return, for each branch; co_resident: networks in memory with the transformer."""
        branches, sharing = self.guidance.branches(request), self.sharing(request)
        activations += kept_bytes(self.config.dim, streams) if request.caches else 0
        return Stage(
            name="denoise",
            resident="transformer",
            component=self.checkpoint["transformer"],
            splits=(Split(activations=activations, size=1, passes=plan.passes(branches, sharing.branches)),),
            co_resident=co_resident,
            operations=sharing.operations(
                plan.passes([branch]) * one for branch, one in zip(branches, operations, strict=True)
            ),
        )

    def text_run(
        self,
        request: Request,
        plan: SamplingPlan,
        shape: LatentShape,
        patch: int,
        time_step: Callable[[float], TimeStep],
        *,
        packing: Packing = AS_IMAGES,
        denoised: Denoised = _from_velocity,
        learns: bool = False,
    ) -> FlowRun:
        """Return the run of a transformer that sees nothing but the text and the time, one branch of guidance after the
        other. patch: latents a side of a token; time_step: of a timestep (0..1000); learns: True if layers that a LoRA
        trains make the condition, which is then made anew for each denoiser."""
        branches, grid = self.guidance.branches(request), shape.grid(patch)
        texts = self.texts.states(self.prompts(request))
        [stage] = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        transformer, _ = self.residents.acquire(stage)
        timestep = self.schedule_config.timestep

        def make_pass(positions: tuple[int, ...]) -> Pass:
            condition = transformer.condition(texts[positions[0]], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, time_step(timestep(sigma))))

        def make_phases(initial: Initial | None = None) -> list[Phase]:
            return phases(plan, branches, 1, make_pass)

        shapes = shapes_of(texts, grid)
        if learns:
            return ReferenceRun(self, request, make_phases, shapes, packing=packing, denoised=denoised)
        return FlowRun(self, request, make_phases(), shapes, packing=packing, denoised=denoised)

    def announce(self, requests: Sequence[Request]) -> None:
        shown = (one for one in requests if len(one.images) >= self.inputs.fewest)  # else the prompts of no image
        self.texts.announce([self.prompt(one.prompt, one.images) for one in shown])

    def adapt(self, deltas: Deltas) -> None:
        before, self.checkpoint = self.checkpoint, self.checkpoint.with_deltas(deltas)
        now = self.checkpoint["transformer"]
        self.modulations.renew(before["transformer"], now)
        self.texts.renew(self.checkpoint.texts)
        if now.config != self.config:  # its first layer has other inputs now
            self.residents.drop("transformer")
            self.config = now.config
        elif not before["transformer"].plan.same_deltas(now.plan):
            self.residents.adapt("transformer", now)

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> Iterator[FlowRun]:
        evaluate = strategy(self.engine.group, self.sharing(request))
        run = self.start(request, plan, shape)
        run.evaluate = evaluate
        try:
            yield run
        finally:
            run.close()

    def forget(self) -> None:
        self.texts.forget()
        self.modulations.clear()
        if self.controls is not None:
            self.controls.clear()

    def close(self) -> None:
        self.modulations.clear()
        self.texts.close()
        super().close()


def shapes_of(texts: Sequence[Array], grid: tuple[int, int]) -> dict[str, str]:
    """Return the shapes of text states and of an image of `grid` rows and columns of tokens, for --debug."""
    rows, columns = grid
    return {
        "text": ", ".join(str(list(text.shape)) for text in texts),
        "tokens": f"{rows} x {columns} = {rows * columns}",
    }


class FlowRun:
    """A run for one request, whose transformer is open. `phases` hold the only reference to it, since it may be freed
    for the VAE. packing: between latents [1 C h w] and the transformer's input and output."""

    title: ClassVar[str] = "transformer"
    control: Controlling | None = None

    def __init__(
        self,
        model: FlowModel,
        request: Request,
        phases: Sequence[Phase],
        shapes: dict[str, str],
        *,
        packing: Packing = AS_IMAGES,
        denoised: Denoised = _from_velocity,
    ):
        self.model, self.request, self.phases, self.shapes = model, request, phases, shapes
        (self.pack, self.unpack), self.denoised = packing, denoised
        self.evaluate: Evaluate = serial

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            self.title,
            self.phases,
            self.denoised,
            partial(self.model.guidance.combined, self.model.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
            control=self.control,
            evaluate=self.evaluate,
        )

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(self.pack(latents))

    def latents(self, x: Array) -> Latents:
        return self.unpack(self.model.engine.numpy(x)).astype(np.float32)

    def close(self) -> None:
        """Free the run's arrays on the device, before the VAE decodes."""
        self.phases, self.control = [], None


class ReferenceRun(FlowRun):
    """A run for one request that begins when its initial state is known: then its phases are made, for references [1
    C h w] and a mask, and the function of its control networks, for the latents of their pictures."""

    def __init__(
        self,
        model: FlowModel,
        request: Request,
        make_phases: Callable[[Initial], list[Phase]],
        shapes: dict[str, str],
        *,
        packing: Packing = AS_IMAGES,
        make_control: Callable[[Sequence[Latents]], Controlling | None] | None = None,
        denoised: Denoised = _from_velocity,
    ):
        super().__init__(model, request, [], shapes, packing=packing, denoised=denoised)
        self.make_phases, self.make_control = make_phases, make_control

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        self.phases = self.make_phases(initial)
        self.control = None if self.make_control is None else self.make_control(initial.controls)
        return super().denoiser(segment, initial)

    def close(self) -> None:
        super().close()
        del self.make_phases, self.make_control  # they hold networks
