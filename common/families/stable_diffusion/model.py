"""Stable Diffusion 1.x, 2.x and XL for the denoise loop: text states, UNet predictions, guidance, an optional refiner.

Both branches of guidance go through the UNet in one batch, or one after the other if memory is short (`Expert`). Text
states and the UNet's context from them are computed once per run. If both UNets do not fit, the base's is freed before
the refiner's is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.stable_diffusion import control, few_steps, ip_adapter
from qwenimg.common.families.stable_diffusion.control import (
    ActiveControl,
    ControlledCondition,
    ControlledUNet,
    ControlNetworks,
    ControlRun,
)
from qwenimg.common.families.stable_diffusion.expert import GUIDANCE, Expert, guidance, parts, schedules, sinusoids
from qwenimg.common.families.stable_diffusion.ip_adapter import ActivePictures, PicturePrompts
from qwenimg.common.networks.denoisers.unet import UNetConfig
from qwenimg.common.networks.encoders import clip
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.parts import vae
from qwenimg.common.parts.control_net import Controller
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.models.inputs import MaskInput, PictureInputs
from qwenimg.common.pipeline.steps import inpaint
from qwenimg.common.pipeline.steps.denoiser import Denoiser, Phase, phases
from qwenimg.common.pipeline.steps.evaluation import strategy
from qwenimg.common.pipeline.steps.inpaint import Initial, Latents
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment, diffusion_plan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.prompts import composed, inversion, scheduled, web_syntax
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Condition, TimeStep
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.sampling import discrete
from qwenimg.common.weights.loras.lora import Deltas


class StableDiffusion(DiffusionModel):
    """A Stable Diffusion model for `Pipeline`, and its refiner if the checkpoint has one."""

    guidance = GUIDANCE
    controls: ControlNetworks
    options = frozenset(
        {
            "step_cache",
            "cached_calls",
            "guidance_rescale",
            "control_mode",
            "refine_at",
            "clip_skip",
        }
    )

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents = Residents(runtime)
        super().__init__(runtime, checkpoint, residents, vae.scaled_halves(residents, checkpoint["vae"]))
        self.base = Expert(checkpoint, residents)
        self.refiner = None if checkpoint.refiner is None else Expert(checkpoint.refiner, residents)
        self.controls = ControlNetworks(residents, self.scale)
        self.picture_prompts = PicturePrompts(residents, checkpoint["unet"].config)
        self.multiple, self.channels = self.scale, self.vae.config.latent_channels
        if self.base.facts.sees_mask:
            self.inputs = PictureInputs(mask=MaskInput())
        config: UNetConfig = checkpoint["unet"].config
        self.few_steps = few_steps.few_steps(
            config.cross_attention_dim, sdxl=self.base.facts.sdxl, predicts=checkpoint.scheduler.prediction_type
        )

    def as_text(self, prompt: str) -> str:
        return web_syntax.as_text(prompt)

    def plan(self, request: Request) -> SamplingPlan:
        self.sharing(request)  # only for its errors
        if request.cfg_end < 1 and len(parts(request)) > 1:
            raise UsageError(
                "--cfg-end does not go with AND, which needs guidance in every step; leave out one of them"
            )
        for expert in self.experts():
            for text in expert.checkpoint.texts.values():
                clip.used_states(text.config, expert.facts.sdxl, request.family_options.clip_skip)
        plan = diffusion_plan(
            self.checkpoint.scheduler,
            request,
            self.engine.numpy,
            sdxl=self.base.facts.sdxl,
            refine_at=None if self.refiner is None else request.family_options.refine_at,
        )
        schedules(request, plan)  # only for its errors
        return plan

    def stages(self, request: Request, plan: SamplingPlan, shape: LatentShape, counted: bool = True) -> list[Stage]:
        encoding, steps = [self.vae.encoding(shape)], self.steps(request, plan, shape)
        return [
            *(encoding if request.encodes_start else []),
            *(stage for expert in self.experts() for stage in expert.encoding(request, plan, counted)),
            *(encoding if self.inputs.mask.is_input and request.mask is None else []),  # an empty image: `_extra`
            *self.picture_prompts.stages(request, self.nets),
            *self.controls.stages(request, self.control_run(request, plan, shape), [*steps.values()][:1]),
            *steps.values(),
            self.vae.decoding(shape),
        ]

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> dict[Expert, Stage]:
        """Return the stage of each UNet."""
        stages = {expert: expert.steps(request, shape, plan, i) for i, expert in enumerate(self.experts())}
        if nets := self.controls.co_resident(request):
            kept = self.controls.kept_bytes(request, self.control_run(request, plan, shape))
            splits = (replace(one, activations=one.activations + kept) for one in stages[self.base].splits)
            stages[self.base] = replace(stages[self.base], splits=tuple(splits), co_resident=nets)
        if together := self.base.texts.together:
            stages[self.base] = replace(stages[self.base], co_resident=together)
        return stages

    def control_run(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> ControlRun:
        """Return the facts of a run that the stages of its ControlNets depend on."""
        branches = GUIDANCE.branches(request)
        return ControlRun(plan=plan, shape=shape, branches=len(branches), calls=plan.passes(branches, len(branches), 0))

    def check_weights(self) -> None:
        super().check_weights()
        if self.refiner is not None:
            self.refiner.check_weights()

    def announce(self, requests: Sequence[Request]) -> None:
        texts = [(one, _unchanging(inversion.marked(one.prompt, one.inversions))) for one in requests]
        for expert in self.experts():
            expert.texts.announce(key for one, parts in texts for key in expert.keys_of(one, parts))

    def adapt(self, deltas: Deltas) -> None:
        self.base.adapt(deltas)  # LoRAs are made for the base; the refiner's layers only have similar names
        self.checkpoint = self.base.checkpoint

    def control(self, nets: Mapping[str, Controller]) -> None:
        super().control(nets)
        self.base.checkpoint = self.checkpoint

    @contextmanager
    def learning_texts(self) -> Iterator[None]:
        self.base.texts.together = frozenset({self.base.name, *self.base.texts.encoders})
        try:
            yield
        finally:
            self.base.texts.together = frozenset()

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
        for expert in self.experts():
            expert.texts.close()
        super().close()


class DiffusionRun:
    """A run for one request. The denoised latents are c_skip x + c_out UNet(c_in x, time), with guidance on the
    predictions."""

    def __init__(self, model: StableDiffusion, request: Request, plan: SamplingPlan, shape: LatentShape):
        self.model, self.request, self.plan = model, request, plan
        self.stages = model.steps(request, plan, shape)
        self.schedules, self.calls = schedules(request, plan), 0
        for expert in model.experts():
            if not expert.texts.together:
                expert.texts.arrays(expert.keys(request, plan))  # before a UNet is loaded
        self.shape = shape
        first = model.base.conditioning(request, self._texts(0))
        self.shapes = {"text": str(list(first.texts.shape))}

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        expert = self.model.expert(segment)
        config, scheduler, branches = expert.unet_config, expert.checkpoint.scheduler, GUIDANCE.branches(self.request)
        time = discrete.clock(scheduler.levels, segment.schedule)
        # before the UNet is loaded: the VAE's encoder may free it, and a reference here would keep it in memory
        extra = [self.array(part) for part in self._extra(initial)] if expert.facts.sees_mask else []
        prompts = self._pictures(segment, initial)
        controls = self._controls(segment)
        pictures = [self.array(picture) for picture in initial.controls] if controls else []
        unet, split = self.model.residents.acquire(self.stages[expert])
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
                condition = unet.condition(rows.texts, rows.added)
                if not controls and not prompts:
                    return Pass(unet, condition, inputs)
                own = ip_adapter.rows(positions, len(branches))

                @cache
                def with_pictures(numbers: tuple[int, ...]) -> Condition:
                    held = [one for number in numbers for one in prompts[number].pictures]
                    return unet.with_pictures(condition, held, own) if held else condition

                controlled = control.controlled(self.request, positions, len(branches))
                nets = control.conditions(controls, pictures, rows, controlled)
                return Pass(ControlledUNet(unet), ControlledCondition(unet=with_pictures, nets=nets), inputs)

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
            control=(lambda x, sigma: control.holding(controls, prompts, sigma)) if controls or prompts else None,
            evaluate=strategy(engine.group, self.model.sharing(self.request)),
            next_phases=next_phases,
        )

    def _pictures(self, segment: Segment, initial: Initial) -> list[ActivePictures]:
        """Encode the pictures of the request that are prompts, for the base's segment."""
        if segment.refines or not self.request.controls:
            return []
        return self.model.picture_prompts.open(self.request, self.model.nets, self.plan, self.shape, initial.controls)

    def _controls(self, segment: Segment) -> list[ActiveControl]:
        """Open the ControlNets of the request, for the base's segment."""
        if segment.refines or not self.request.controls:
            return []
        run = self.model.control_run(self.request, self.plan, self.shape)
        return self.model.controls.open(self.request, run, [self.stages[self.model.base]])

    def _texts(self, call: int) -> tuple[str, ...]:
        """Return the texts of the branches in a call of the model, counted from 0 over all segments."""
        return tuple(scheduled.text_at(schedule, call) for schedule in self.schedules)

    def _extra(self, initial: Initial) -> list[Latents]:
        """Return the mask and the latents of the masked image; without them, a mask of ones and an empty (gray)
        image."""
        if initial.mask is not None and initial.mask.channels:
            return initial.mask.channels
        return self.model.inputs.mask.everything(self.model.vae, self.shape)

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(latents)

    def latents(self, x: Array) -> Latents:
        return self.model.engine.numpy(x).astype(np.float32)


def _unchanging(prompt: str) -> list[str]:
    """Return the texts of `prompt` that are the same in every run; none of one that is refused when it is drawn."""
    with suppress(UsageError):
        return [part.text for part in composed.parts(prompt) if not scheduled.changes(part.text)]
    return []
