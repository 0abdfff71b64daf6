"""Stable Cascade for the denoise loop: the prior makes an embedding of the image, from which the decoder makes the
latents, each in its own steps from noise.

The text is encoded once for both, and each network is freed for the next one where memory is short. The branches of
guidance run in turn, since each has a condition of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.cascade import memory, sizes
from qwenimg.common.families.cascade.checkpoint import EFFNET
from qwenimg.common.families.cascade.known import EFFNET_FILE, NAME
from qwenimg.common.families.cascade.texts import CascadeTexts
from qwenimg.common.families.cascade.vae import PaellaHalves
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks.denoisers.cascade_conditioning import time_row
from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts.texts.clip_texts import ClipKey
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.models.inputs import BlendedMask, PictureInputs
from qwenimg.common.pipeline.steps.denoiser import Denoiser, phases
from qwenimg.common.pipeline.steps.evaluation import strategy
from qwenimg.common.pipeline.steps.guidance import Guidance, cfg
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents, blend
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment, Solver
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts import web_syntax
from qwenimg.common.prompts.weighted import LENGTH
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.sampling import discrete, schedules, table, wuerstchen
from qwenimg.common.weights.loras.lora import Deltas

PRIOR, DECODER = "transformer", "decoder"
"""The names of the components."""
NO_ENCODER = (
    f"{EFFNET_FILE}, which encodes a picture, is not here: get it by qwenimg pull {NAME}, or give it by --effnet FILE"
)


class EmbeddingMask(BlendedMask):
    """A mask of an embedding, from which the decoder draws the whole picture."""

    def in_latents(self, hole: NDArray[np.bool_], scale: int) -> Latents:
        return sizes.in_embedding(hole)


class Cascade(DiffusionModel):
    """A Stable Cascade for `Pipeline`."""

    guidance = Guidance(formula=cfg)
    inputs = PictureInputs(mask=EmbeddingMask(put_back=True))
    multiple = sizes.MULTIPLE
    options = frozenset({"clip_skip", "decoder_steps", "decoder_guidance"})

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        encoder = checkpoint.components.get(EFFNET)
        super().__init__(runtime, checkpoint, residents, PaellaHalves(residents, checkpoint["vae"], encoder))
        if encoder is None:
            self.inputs = PictureInputs(most=0, refusal=NO_ENCODER)
        self.texts = CascadeTexts(residents, checkpoint)
        self.channels = checkpoint[PRIOR].config.in_channels

    @property
    def decoded_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    def latent_sides(self, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the embedding for a picture."""
        super().latent_sides(width, height)  # only for its errors
        return self.vae.sides(height, width)

    def plan(self, request: Request) -> SamplingPlan:
        self.sharing(request)  # only for its errors
        if request.goes_on_from == "latents":
            raise UsageError("its latents are no embedding to go on from; leave hires-with out, or give lanczos")
        for text in self.checkpoint.texts.values():
            self.texts.used_states(text.config, request.family_options.clip_skip)  # likewise
        sampler = table.find(request.sampler or wuerstchen.SAMPLER)
        solver: Solver = wuerstchen.ddpm if sampler.name == wuerstchen.SAMPLER else sampler.function
        solver = partial(sampler.function, to_host=self.engine.numpy) if sampler.adaptive else solver
        build = partial(wuerstchen.build, self.checkpoint.scheduler, sampler.name, request.schedule)
        prior = build(request.steps)
        if request.starts_from_picture:
            prior = schedules.part(prior, schedules.skipped(request.steps, request.strength))
        latents = sizes.latents_of(LatentShape(1, *self.latent_sides(request.width, request.height)))
        shape = (1, self.decoded_channels, latents.rows, latents.columns)
        segments = (
            Segment(schedule=prior, solver=solver),
            Segment(schedule=build(request.family_options.decoder_steps), solver=solver, shape=shape),
        )
        whole, name = not request.starts_from_picture or request.strength == 1, request.schedule or schedules.MODEL
        return SamplingPlan(sampler=sampler.name, schedule=name, segments=segments, whole=whole)

    def requests(self, request: Request) -> dict[str, Request]:
        """Return the request as the prior and as the decoder draw it."""
        return {PRIOR: request, DECODER: replace(request, guidance=request.family_options.decoder_guidance)}

    def parts(self, request: Request, plan: SamplingPlan) -> list[tuple[str, Request, SamplingPlan]]:
        """Return the prior and the decoder, each with its request and its part of the plan; the prior alone for a plan
        of one segment, which trains it."""
        both = zip(self.requests(request).items(), plan.segments, strict=False)
        return [(name, asked, replace(plan, segments=(segment,))) for (name, asked), segment in both]

    def warnings(self, request: Request) -> list[str]:
        return web_syntax.warnings((branch.prompt for branch in self.guidance.branches(request)), weighs=True)

    # Stages

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        keys = self.keys(request)
        pictures = [self.vae.encoding(shape)] if request.encodes_start else []
        encoding = [] if self.texts.has(keys) else self.texts.stages(keys, counted)
        return [
            *pictures,
            *encoding,
            *self.steps(request, plan, shape, counted),
            self.vae.decoding(sizes.latents_of(shape)),
        ]

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        """Return the stages of the prior and of the decoder, for an embedding of `shape`."""
        chunks = max(len(self.texts.chunks(key)[0]) for key in self.keys(request)) if counted else 1
        stages = []
        for name, asked, part in self.parts(request, plan):
            component, branches = self.checkpoint[name], self.guidance.branches(asked)
            config: CascadeConfig = component.config
            latents = shape if name == PRIOR else sizes.latents_of(shape)
            tokens = config.text_tokens(chunks * LENGTH)
            peak = memory.step_peak(config, latents.rows, latents.columns)
            sides = memory.sides(config, latents.rows, latents.columns)
            levels = [(level.heads, h * w + tokens) for level, (h, w) in zip(config.down, sides, strict=True)]
            limit = self.engine.workspace.score_bytes
            peak += max((scores(heads, 1, longest, limit) for heads, longest in levels if heads), default=0)
            passes = part.passes(branches, self.sharing(request).branches)
            operations = memory.step_operations(config, latents.rows, latents.columns, tokens)
            stages.append(
                Stage(
                    name="denoise" if name == PRIOR else "refine",
                    resident=name,
                    component=component,
                    splits=(Split(activations=self.runtime.call_bytes(component, peak), size=1, passes=passes),),
                    operations=passes * operations,
                )
            )
        return stages

    # Texts and weights

    def keys(self, request: Request) -> list[ClipKey]:
        """Return the keys of the states of a run's texts, those of the decoder's branches among them."""
        every = (self.guidance.branches(asked) for asked in self.requests(request).values())
        prompts = dict.fromkeys(branch.prompt for branches in every for branch in branches)
        return self.texts.keys([*prompts], request.family_options.clip_skip)

    def check_weights(self) -> None:
        super().check_weights()
        self.residents.check_weights(DECODER, self.checkpoint[DECODER])

    def announce(self, requests: Sequence[Request]) -> None:
        keys = (self.texts.keys([one.prompt], one.family_options.clip_skip) for one in requests)
        self.texts.announce(key for some in keys for key in some)

    def adapt(self, deltas: Deltas) -> None:
        self.checkpoint = self.checkpoint.with_deltas(deltas)
        self.texts.renew(self.checkpoint.texts)
        for name in (PRIOR, DECODER):
            self.residents.adapt(name, self.checkpoint[name])

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> Iterator[CascadeRun]:
        yield CascadeRun(self, request, plan, shape)

    def forget(self) -> None:
        self.texts.forget()

    def close(self) -> None:
        self.texts.close()
        super().close()


class CascadeRun:
    """A run for one request."""

    def __init__(self, model: Cascade, request: Request, plan: SamplingPlan, shape: LatentShape):
        self.model, self.plan, self.shape = model, plan, shape
        self.parts = dict(zip(plan.segments, model.parts(request, plan), strict=True))
        self.evaluate = strategy(model.engine.group, model.sharing(request))
        self.stages = dict(zip((PRIOR, DECODER), model.steps(request, plan, shape), strict=False))
        self.skip = request.family_options.clip_skip
        model.texts.arrays(model.keys(request))  # before a UNet is loaded
        states, _ = model.texts.states([request.prompt], self.skip)
        self.shapes = {"text": str(list(states.shape)), "embedding": f"{shape.rows} x {shape.columns}"}

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        """Return the denoiser of the prior or of the decoder, which sees the embedding in the place of a picture."""
        model, engine = self.model, self.model.engine
        name, request, plan = self.parts[segment]
        branches = model.guidance.branches(request)
        states, pooled = model.texts.states([branch.prompt for branch in branches], self.skip)
        unet, _ = model.residents.acquire(self.stages[name])
        config, scheduler = model.checkpoint[name].config, model.checkpoint.scheduler
        time = discrete.clock(scheduler, segment.schedule)
        latents = sizes.latents_of(self.shape)
        grid = latents.rows // config.patch_size, latents.columns // config.patch_size

        def condition(branch: int) -> Condition:
            text = engine.array(pooled[branch : branch + 1])
            if name == PRIOR:
                return unet.condition(text, engine.array(states[branch : branch + 1]))
            [embedding] = initial.references
            seen = embedding if branch == 0 else np.zeros_like(embedding)
            return unet.condition(text, None, engine.array(seen), grid)

        def inputs(x: Array, sigma: float) -> tuple[Array, TimeStep]:
            return discrete.scalings(scheduler.prediction_type, sigma)[0] * x, time_row(config, time(sigma))

        def make_pass(positions: tuple[int, ...]) -> Pass:
            return Pass(unet, condition(positions[0]), inputs)

        def denoised(x: Array, sigma: float, prediction: Array) -> Array:
            _, c_skip, c_out = discrete.scalings(scheduler.prediction_type, sigma)
            return c_skip * x + c_out * prediction

        return Denoiser(
            model.runtime,
            "the prior" if name == PRIOR else "the decoder",
            phases(plan, branches, 1, make_pass),
            denoised,
            partial(model.guidance.combined, engine, request),
            blend=blend(initial, segment.schedule, self.array),
            evaluate=self.evaluate,
        )

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(latents)

    def latents(self, x: Array) -> Latents:
        return self.model.engine.numpy(x).astype(np.float32)
