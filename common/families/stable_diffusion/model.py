"""Stable Diffusion 1.x, 2.x and XL for the denoise loop: text states, UNet predictions, guidance, an optional refiner.

Both branches of guidance go through the UNet in one batch, or one after the other if memory is short (`Expert`). Text
states and the UNet's context from them are computed once per run. If both UNets do not fit, the base's is freed before
the refiner's is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial
from types import MappingProxyType

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import few_steps
from qwenimg.common.families.stable_diffusion.expert import GUIDANCE, Expert, guidance, schedules, sinusoids
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import lora_layers, vae
from qwenimg.common.parts.control_net import Controller
from qwenimg.common.pipeline.models.diffusion_model import Image
from qwenimg.common.pipeline.steps import inpaint
from qwenimg.common.pipeline.steps.denoiser import Denoiser, Phase, phases
from qwenimg.common.pipeline.steps.evaluation import strategy
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts import composed, scheduled
from qwenimg.common.request.request import Request
from qwenimg.common.runtime import group
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine, TimeStep
from qwenimg.common.runtime.group import Sharing
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import discrete, table
from qwenimg.common.sampling import schedules as noise_schedules
from qwenimg.common.weights.loras.lora import Deltas
from qwenimg.common.weights.loras.lora_names import Names


class StableDiffusion:
    """A Stable Diffusion model for `Pipeline`, and its refiner if one is given."""

    guidance = GUIDANCE
    images: tuple[int, int] = (0, 1)
    sees_alpha = False
    repeats_images = False
    soft_masks = False
    writes_prompts = False
    nets: Mapping[str, Controller] = MappingProxyType({})
    options = frozenset({"step_cache", "cached_calls", "guidance_rescale", "refine_at", "clip_skip"})

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None = None):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.residents = Residents(runtime)
        self.base = Expert(checkpoint, self.residents)
        self.refiner = None if refiner is None else Expert(refiner, self.residents)
        vae_config = checkpoint["vae"].config
        self.scale = self.multiple = vae_config.scale
        self.channels = vae_config.latent_channels
        self.sees_mask = int(self.base.facts.sees_mask)
        config: UNetConfig = checkpoint["unet"].config
        self.few_steps = few_steps.few_steps(
            config.cross_attention_dim, sdxl=self.base.facts.sdxl, predicts=checkpoint.scheduler.prediction_type
        )
        self.vae = vae.scaled_halves(self.residents, checkpoint["vae"])

    @cached_property
    def lora_names(self) -> Names:
        return lora_layers.names(self.checkpoint)

    def plan(self, request: Request) -> SamplingPlan:
        self.sharing(request)  # only for its errors
        if request.cfg_end < 1 and len(composed.parts(request.prompt)) > 1:
            raise UsageError(
                "--cfg-end does not go with AND, which needs guidance in every step; leave out one of them"
            )
        for expert in self.experts():
            for text in expert.checkpoint.texts.values():
                clip.used_states(text.config, expert.facts.sdxl, request.clip_skip)
        plan = _plan(self.checkpoint, request, self.engine, refined=self.refiner is not None)
        schedules(request, plan)  # only for its errors
        return plan

    def sharing(self, request: Request) -> Sharing:
        return group.sharing(self.engine.group, len(GUIDANCE.branches(request)), heads=0)

    def warnings(self, request: Request) -> list[str]:
        return []

    def frames(self, request: Request) -> int:
        return 1

    def references(self, request: Request) -> list[Latents]:
        return []

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        encoding = [self.vae.encoding(shape)]
        return [
            *(encoding if request.image is not None else []),
            *(stage for expert in self.experts() for stage in expert.encoding(request, plan, counted)),
            *(encoding if self.sees_mask and request.mask is None else []),  # an empty image: `_extra`
            *self.steps(request, plan, shape).values(),
            self.vae.decoding(shape),
        ]

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> dict[Expert, Stage]:
        """Return the stage of each UNet."""
        return {expert: expert.steps(request, shape, plan, i) for i, expert in enumerate(self.experts())}

    def variant(self, change: Change) -> StableDiffusion:
        base = self.runtime.changed(self.checkpoint, change, self.residents.weights)
        return StableDiffusion(*base, None if self.refiner is None else self.refiner.checkpoint)

    def control(self, nets: Mapping[str, Controller]) -> None:
        assert not nets, "no row of this family opens any"

    def check_weights(self) -> None:
        self.vae.check_weights()
        if self.refiner is not None:
            self.refiner.check_weights()

    def with_prompt(self, request: Request) -> Request:
        return request

    def announce(self, prompts: Sequence[str], clip_skip: int = 0, images: Sequence[Image] = ()) -> None:
        texts = [text for prompt in prompts for text in _unchanging(prompt)]
        for expert in self.experts():
            expert.texts.announce(expert.texts.keys(texts, clip_skip))

    def adapt(self, deltas: Deltas) -> None:
        self.base.adapt(deltas)  # LoRAs are made for the base; the refiner's layers only have similar names

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> Iterator[DiffusionRun]:
        yield DiffusionRun(self, request, plan, shape)

    def expert(self, segment: Segment) -> Expert:
        """Return the expert that computes `segment`."""
        expert = self.refiner if segment.refines else self.base
        assert expert is not None
        return expert

    def experts(self) -> list[Expert]:
        return [self.base] if self.refiner is None else [self.base, self.refiner]

    def forget(self) -> None:
        for expert in self.experts():
            expert.texts.forget()

    def close(self) -> None:
        self.residents.free()
        for expert in self.experts():
            expert.texts.close()
            expert.checkpoint.close()


class DiffusionRun:
    """A run for one request. The denoised latents are c_skip x + c_out UNet(c_in x, time), with guidance on the
    predictions."""

    def __init__(self, model: StableDiffusion, request: Request, plan: SamplingPlan, shape: LatentShape):
        self.model, self.request, self.plan = model, request, plan
        self.stages = model.steps(request, plan, shape)
        self.schedules, self.calls = schedules(request, plan), 0
        for expert in model.experts():
            expert.texts.arrays(expert.keys(request, plan))  # before a UNet is loaded
        first = model.base.conditioning(request, self._texts(0))
        self.shapes = {"text": str(list(first.texts.shape))}

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        expert = self.model.expert(segment)
        config, scheduler, branches = expert.unet_config, expert.checkpoint.scheduler, GUIDANCE.branches(self.request)
        time = discrete.clock(scheduler.levels, segment.schedule)
        # before the UNet is loaded: the VAE's encoder may free it, and a reference here would keep it in memory
        extra = [self.array(part) for part in self._extra(initial)] if expert.facts.sees_mask else []
        unet, split = self.model.residents.enter(self.stages[expert])
        engine = self.model.engine
        scalings = partial(discrete.scalings, scheduler.prediction_type)

        def inputs(x: Array, sigma: float) -> tuple[Array, TimeStep]:
            scaled = scalings(sigma)[0] * x
            latents = engine.join([scaled, *extra]) if extra else scaled
            return latents, sinusoids(config, [time(sigma)], config.time_channels)

        @lru_cache(maxsize=1)
        def phases_of(texts: tuple[str, ...]) -> list[Phase]:
            conditioning = expert.conditioning(self.request, texts)

            def make_pass(positions: tuple[int, ...]) -> Pass:
                rows = conditioning.of(positions)
                return Pass(unet, unet.condition(rows.texts, rows.added), inputs)

            return phases(self.plan, branches, split.size or len(branches), make_pass)

        def next_phases() -> list[Phase]:
            self.calls += 1
            return phases_of(self._texts(self.calls - 1))

        def denoised(x: Array, sigma: float, prediction: Array) -> Array:
            _, c_skip, c_out = scalings(sigma)
            return c_skip * x + c_out * prediction

        return Denoiser(
            self.model.runtime,
            "unet",
            [],
            denoised,
            partial(guidance(self.request).combined, engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
            evaluate=strategy(engine.group, self.model.sharing(self.request)),
            next_phases=next_phases,
        )

    def _texts(self, call: int) -> tuple[str, ...]:
        """Return the texts of the branches in a call of the model, counted from 0 over all segments."""
        return tuple(scheduled.text_at(schedule, call) for schedule in self.schedules)

    def _extra(self, initial: Initial) -> list[Latents]:
        """Return the mask and the latents of the masked image; without them, a mask of ones and an empty (gray)
        image."""
        if initial.mask is not None and initial.mask.channels:
            return initial.mask.channels
        everything = np.ones_like(initial.noise[:, :1])
        height, width = (side * self.model.scale for side in initial.noise.shape[2:])
        return [everything, self.model.vae.encode(np.zeros((1, 3, height, width), np.float32))[0]]

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(latents)

    def latents(self, x: Array) -> Latents:
        return self.model.engine.numpy(x).astype(np.float32)


def _unchanging(prompt: str) -> list[str]:
    """Return the texts of `prompt` that are the same in every run; none of one that is refused when it is drawn."""
    with suppress(UsageError):
        return [part.text for part in composed.parts(prompt) if not scheduled.changes(part.text)]
    return []


# The schedule


def _plan(checkpoint: Checkpoint, request: Request, engine: Engine, *, refined: bool) -> SamplingPlan:
    """Plan the run: the sampler and the schedule, by name or the model's own, the part of the schedule that an initial
    image leaves, and the refiner's segment. Raise UsageError."""
    config = checkpoint.scheduler
    sampler = table.find(request.sampler or noise_schedules.sampler_of(config))
    sdxl = checkpoints.facts(checkpoint).sdxl
    schedule = noise_schedules.build(config, sampler.rule, request.schedule, request.steps, sdxl=sdxl)
    if request.image is not None:
        schedule = noise_schedules.part(schedule, noise_schedules.skipped(request.steps, request.strength))
    parts = noise_schedules.split(schedule, request.refine_at, config.num_train_timesteps) if refined else (schedule,)
    solver = partial(sampler.function, to_host=engine.numpy) if sampler.adaptive else sampler.function
    segments = tuple(Segment(schedule=part, solver=solver, refines=i > 0) for i, part in enumerate(parts))
    whole = request.image is None or request.strength == 1
    name = request.schedule or noise_schedules.MODEL
    return SamplingPlan(sampler=sampler.name, schedule=name, segments=segments, whole=whole)
