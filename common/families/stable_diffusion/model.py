"""Stable Diffusion 1.x, 2.x and XL for the denoise loop: text states, UNet predictions, guidance, an optional refiner.

Both branches of guidance go through the UNet in one batch. Text states and what the UNet makes of them are computed
once per run. The base's UNet is freed before the refiner's is loaded where both do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.families.stable_diffusion import checkpoint as checkpoints
from qwenimg.common.families.stable_diffusion import few_steps, lora_names, memory
from qwenimg.common.families.stable_diffusion.texts import ClipTexts
from qwenimg.common.memory import operations
from qwenimg.common.memory.memory import scores
from qwenimg.common.memory.needs import Needs
from qwenimg.common.networks import clip
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.numbers import timesteps
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, Guidance
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment, Solver
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint, Component
from qwenimg.common.runtime.engine import Array, Engine, UNet
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.vae import VAEHalves
from qwenimg.common.sampling import discrete, schedules, table
from qwenimg.common.sampling.table import Sampler
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.lora_names import Names

AESTHETIC, POOR_AESTHETIC = 6.0, 2.5  # the refiner's aesthetic score for the prompt and for the negative branch


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """What the UNet gets beside latents and time. `added`: rows for SDXL's sizes and pooled text, None for others."""

    texts: Latents  # [B, S, C]; the prompt's first, then the negative one's
    added: Latents | None

    def part(self, begin: int, end: int) -> Conditioning:
        """Of these branches."""
        added = None if self.added is None else self.added[begin:end]
        return Conditioning(texts=self.texts[begin:end], added=added)


class Expert:
    """The model of one part of the schedule, the base or the refiner: its texts and its UNet."""

    def __init__(self, checkpoint: Checkpoint, runtime: Runtime, make_room: Callable[[int], int]):
        self.checkpoint, self.runtime, self.make_room = checkpoint, runtime, make_room
        self.facts = checkpoints.facts(checkpoint)
        self.unet_config: UNetConfig = checkpoint["unet"].config
        self.texts = ClipTexts(checkpoint, runtime, make_room)
        self._unet: UNet | None = None
        self._open = checkpoint["unet"]  # as it was loaded
        self._checked = False  # its weights

    def conditioning(self, request: Request) -> Conditioning:
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        states, pooled = self.texts.states(prompts, request.clip_skip)
        if self.checkpoint.zeros_for_empty and request.guided and not request.negative_prompt:
            states[1], pooled[1] = 0, 0
        return Conditioning(texts=states, added=self._added(request, pooled))

    def _added(self, request: Request, pooled: Latents) -> Latents | None:
        """SDXL's pooled text and sinusoids of original size, crop, and target size or aesthetic score: [B, A]."""
        if not self.facts.sdxl:
            return None
        sizes: list[float] = [request.height, request.width, 0, 0]
        last = [[AESTHETIC], [POOR_AESTHETIC]] if self.facts.refiner else [[request.height, request.width]] * 2
        channels = self.unet_config.addition_time_embed_dim or 256
        rows = [_sinusoids(self.unet_config, [*sizes, *last[i]], channels).reshape(-1) for i in range(len(pooled))]
        return np.concatenate([pooled, np.stack(rows)], axis=1).astype(np.float32)

    def adapt(self, deltas: Deltas) -> None:
        """Of what is loaded, the weights that change are read again."""
        self.checkpoint = self.checkpoint.with_deltas(deltas)
        self.texts.renew(self.checkpoint.texts)
        if self._unet is not None:
            self._open = self.runtime.readapt(self._unet, self._open, self.checkpoint["unet"], "unet", self.free)

    def unet(self, more: int = 0) -> UNet:
        """The UNet, once it is known that its weights and `more` bytes of a step fit."""
        component = self._fitting(self.room(more), more)
        if self._unet is not None and component is self._open:
            self.runtime.check_fit("a step of this size", more)
            return self._unet
        self.free()
        self._unet, self._open = self.runtime.open(component, self.name, more), component
        return self._unet

    def room(self, more: int) -> int:
        """Bytes for its weights and a step, of which `more` are asked for."""
        whole = self.runtime.weight_bytes(self.checkpoint["unet"])
        return self.make_room(0 if self.loaded else whole + more) + sum(self.held.values())

    def _fitting(self, room: int, more: int) -> Component:
        """The UNet as it is loaded, or as it is to be for `room` bytes, `more` of them for a step."""
        return self.runtime.fitting(self.checkpoint["unet"], self._open if self.loaded else None, room, more)

    @property
    def name(self) -> str:
        return "refiner" if self.facts.refiner else "unet"

    def check_weights(self) -> None:
        """Of the UNet, once, before it is loaded."""
        if not self.loaded and not self._checked:
            self.runtime.check_weights(self.checkpoint["unet"], "refiner")
        self._checked = True

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the UNet's weights where it is loaded, by the name that stages have for it."""
        return {self.name: self.runtime.weight_bytes(self._open)} if self.loaded else {}

    def add_texts(self, needs: Needs, request: Request, counted: bool) -> None:
        """Adds the stage in which its texts are encoded, unless they are; where they are not counted, one chunk."""
        prompts = [request.prompt, request.negative_prompt] if request.guided else [request.prompt]
        if not self.texts.has(prompts, request.clip_skip):
            whole = max(self.runtime.weight_bytes(part) for part in self.checkpoint.texts.values())
            needs.make_room({"text encoder": whole}, 0)
            chunks = max(map(self.texts.chunks, [*prompts, ""])) if counted else 1
            taken = [self.texts.needs(part, needs.left({}), chunks) for part in self.checkpoint.texts.values()]
            weights, activations = max(taken, key=sum)
            needs.add("text", "the text encoder", {"text encoder": weights}, activations)

    def add_steps(self, needs: Needs, request: Request, shape: tuple[int, int], calls: int) -> None:
        """Adds the stage of its UNet, which is called so many times."""
        title = "a step of this size" if self.loaded else f"the {self.name}"
        stage = "refine" if self.facts.refiner else "denoise"
        whole = {self.name: self.runtime.weight_bytes(self.checkpoint["unet"])}
        needs.make_room(whole, self.step_bytes(request, *shape, 1 + request.guided))
        left = needs.left({self.name: 0})
        more = self.step_bytes(request, *shape, self.branches(request, shape, left))
        component = self._fitting(left, more)
        weights = {self.name: self.runtime.weight_bytes(component)}
        needs.add(stage, title, weights, max(more, self.runtime.loading_bytes(component)), stays=True)
        needs.streamed += calls * self.runtime.streamed_bytes(component)

    def branches(self, request: Request, shape: tuple[int, int], room: int) -> int:
        """How many branches of guidance go in one batch: all, unless they fit in `room` bytes beside the UNet only one
        after the other. (Streamed blocks would be read once for each.)"""
        count, weights = 1 + request.guided, self.runtime.weight_bytes(self.checkpoint["unet"])
        one, all_ = (weights + self.step_bytes(request, *shape, branches) for branches in (1, count))
        return 1 if one <= room < all_ else count

    def step_bytes(self, request: Request, height: int, width: int, branches: int) -> int:
        config = self.unet_config
        most = self.runtime.engine.workspace.score_bytes
        attending = [(i, level.heads) for i, level in enumerate(config.down) if level.depth]
        held = max((scores(heads, branches, height * width // 4**i, most) for i, heads in attending), default=0)
        kept = memory.kept_bytes(config, 1 + request.guided, height, width) if request.caches else 0
        activations = memory.step_peak(config, branches, height, width) + held
        return self.runtime.call_bytes(self.checkpoint["unet"], activations) + kept

    @property
    def loaded(self) -> bool:
        return self._unet is not None

    def free(self) -> None:
        self._unet = None
        self.runtime.engine.release()


class StableDiffusion:
    """A Stable Diffusion model for `Pipeline`, with a refiner behind it if one is given."""

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, refiner: Checkpoint | None = None):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.base = Expert(checkpoint, runtime, self._make_room)
        self.refiner = None if refiner is None else Expert(refiner, runtime, self._make_room)
        self.vae_config = checkpoint["vae"].config
        self.scale = self.multiple = self.vae_config.scale
        self.channels = self.vae_config.latent_channels
        self.sees_mask = self.base.facts.sees_mask
        config: UNetConfig = checkpoint["unet"].config
        self.few_steps = few_steps.few_steps(
            config.cross_attention_dim, sdxl=self.base.facts.sdxl, predicts=checkpoint.scheduler.prediction_type
        )
        self.vae = VAEHalves(runtime, checkpoint["vae"], self.vae_config.block_out_channels[0], self._make_room)

    @cached_property
    def lora_names(self) -> Names:
        return lora_names.names(self.checkpoint)

    def plan(self, request: Request) -> SamplingPlan:
        for expert in self.experts():
            for text in expert.checkpoint.texts.values():
                clip.used_states(text.config, expert.facts.sdxl, request.clip_skip)
        return _plan(self.checkpoint, request, self.engine, refined=self.refiner is not None)

    def warnings(self, request: Request) -> list[str]:
        return []

    def needs(self, request: Request, plan: SamplingPlan, shape: tuple[int, int], counted: bool = True) -> Needs:
        unet, experts = self.checkpoint["unet"], self.experts()
        needs = self.runtime.needs(self._loaded(), freed=[expert.name for expert in experts])
        if request.image is not None or self.sees_mask:
            self.vae.add_encoding(needs, shape)
        for expert in experts:
            expert.add_texts(needs, request, counted)
        for expert, calls in zip(experts, plan.calls, strict=True):
            expert.add_steps(needs, request, shape, calls)
        self.vae.add_decoding(needs, shape)
        one = operations.unet(unet.plan, len(unet.config.block_out_channels), *shape)
        needs.steps = plan.evaluations * (1 + request.guided * request.cfg_end) * one
        return needs

    def _loaded(self) -> dict[str, int]:
        """Bytes of the weights that are in memory, by the names that stages have for them."""
        found = self.vae.loaded
        for expert in self.experts():
            found |= expert.held
        return found

    def _free(self) -> int:
        loaded = sum(self._loaded().values())
        return self.runtime.room(loaded) - loaded

    def variant(self, change: Change) -> StableDiffusion:
        base = self.runtime.changed(self.checkpoint, change, sum(self._loaded().values()))
        return StableDiffusion(*base, None if self.refiner is None else self.refiner.checkpoint)

    def check_weights(self) -> None:
        self.vae.check_weights()
        if self.refiner is not None:
            self.refiner.check_weights()

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        for expert in self.experts():
            expert.texts.announce(prompts, clip_skip)

    def adapt(self, deltas: Deltas) -> None:
        self.base.adapt(deltas)  # LoRAs are made for the base, whose layers the refiner's names would only resemble

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: tuple[int, int]) -> Iterator[DiffusionRun]:
        run = DiffusionRun(self, request, plan, shape)
        try:
            yield run
        finally:
            run.conditioning.clear()

    def expert(self, segment: Segment) -> Expert:
        """The one that walks `segment`."""
        expert = self.refiner if segment.refines else self.base
        assert expert is not None
        return expert

    def experts(self) -> list[Expert]:
        return [self.base] if self.refiner is None else [self.base, self.refiner]

    def _make_room(self, need: int) -> int:
        """Frees the UNets where `need` bytes are not free: a text encoder, the other UNet or half of the VAE is to be
        loaded. The bytes that are then free."""
        if need > self._free() and any(expert.loaded for expert in self.experts()):
            self.runtime.notify("stage", "freeing the UNet, since what comes next does not fit beside it")
            self.free_transformer()
        return self._free()

    # Latents

    def encode(self, pixels: NDArray[np.float32]) -> tuple[Latents, Latents]:
        scale, shift = self._statistics()
        mean, deviation = self.vae.encode(pixels)
        return (mean - shift) * scale, deviation * scale

    def decode(self, latents: Latents) -> NDArray[Any]:
        scale, shift = self._statistics()
        return self.vae.decode(latents / scale + shift)

    def _statistics(self) -> tuple[np.float32, np.float32]:
        return np.float32(self.vae_config.scaling_factor), np.float32(self.vae_config.shift_factor or 0)

    def free_transformer(self) -> None:
        for expert in self.experts():
            expert.free()

    def renew(self, part: str) -> None:
        self.vae.free()
        if part != "vae":
            for expert in self.experts():
                expert.texts.forget()
            self.free_transformer()

    def close(self) -> None:
        self.vae.free()
        for expert in self.experts():
            expert.texts.close()
            expert.free()
            expert.checkpoint.close()


class DiffusionRun:
    """One request: the picture is c_skip x + c_out UNet(c_in x, time), guidance taken on the prediction."""

    def __init__(self, model: StableDiffusion, request: Request, plan: SamplingPlan, shape: tuple[int, int]):
        self.model, self.request, self.shape = model, request, shape
        self.guided_above = plan.guided_above(request.cfg_end)
        self.conditioning = {expert: expert.conditioning(request) for expert in model.experts()}
        self.shapes = {"text": str(list(self.conditioning[model.base].texts.shape))}

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        expert = self.model.expert(segment)
        config, scheduler, conditioning = expert.unet_config, expert.checkpoint.scheduler, self.conditioning[expert]
        time = discrete.clock(scheduler.levels, segment.schedule)
        # before the UNet is loaded, which would be freed for the VAE's encoder and yet be held here
        extra = [self.array(part) for part in self._extra(initial)] if expert.facts.sees_mask else []
        count, steps = len(conditioning.texts), partial(expert.step_bytes, self.request, *self.shape)
        together = expert.branches(self.request, self.shape, expert.room(steps(count)))
        unet = expert.unet(steps(together))
        batches = [conditioning.part(i, i + together) for i in range(0, count, together)]
        conditions = [unet.condition(batch.texts, batch.added) for batch in batches]
        alone = self._alone(unet, conditioning)
        engine = self.model.engine
        scalings = partial(discrete.scalings, scheduler.prediction_type)

        def asked(condition: Any, x: Array, sigma: float) -> tuple[Any, ...]:
            scaled = scalings(sigma)[0] * x
            shown = engine.join([scaled, *extra]) if extra else scaled
            return shown, _sinusoids(config, [time(sigma)], config.time_channels), condition

        def denoised(x: Array, sigma: float, prediction: Array) -> Array:
            _, c_skip, c_out = scalings(sigma)
            return c_skip * x + c_out * prediction

        return Denoiser(
            self.model.runtime,
            "unet",
            [Pass(unet, partial(asked, condition)) for condition in conditions],
            denoised,
            Guidance(scale=self.request.guidance, rescale=self.request.guidance_rescale),
            branches=count,
            alone=None if alone is None else Pass(unet, partial(asked, alone)),
            guided_above=self.guided_above,
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _alone(self, unet: UNet, conditioning: Conditioning) -> Any:
        """What the UNet makes of the prompt alone, where guidance ends before the steps do."""
        if not self.request.guided or self.request.cfg_end == 1:
            return None
        first = conditioning.part(0, 1)
        return unet.condition(first.texts, first.added)

    def _extra(self, initial: Initial) -> list[Latents]:
        """Mask and masked picture; where none is given all is to be made, of an empty (gray) picture's latents."""
        if initial.mask is not None and initial.mask.channels:
            return initial.mask.channels
        everything = np.ones_like(initial.noise[:, :1])
        height, width = (side * self.model.scale for side in initial.noise.shape[2:])
        return [everything, self.model.encode(np.zeros((1, 3, height, width), np.float32))[0]]

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(latents)

    def latents(self, x: Array) -> Latents:
        return self.model.engine.numpy(x).astype(np.float32)


# The schedule


def _plan(checkpoint: Checkpoint, request: Request, engine: Engine, *, refined: bool) -> SamplingPlan:
    """Sampler and schedule by name or the model's own, what a picture that is given leaves of the schedule, and where
    the refiner takes over. Raises UsageError."""
    config = checkpoint.scheduler
    sampler = table.find(request.sampler or schedules.sampler_of(config))
    sdxl = checkpoints.facts(checkpoint).sdxl
    schedule = schedules.build(config, sampler.rule, request.schedule, request.steps, sdxl=sdxl)
    if request.image is not None:
        schedule = schedules.part(schedule, schedules.skipped(request.steps, request.strength))
    parts = schedules.split(schedule, request.refine_at, config.num_train_timesteps) if refined else (schedule,)
    solver = _solver(sampler, engine)
    segments = tuple(Segment(schedule=part, solver=solver, refines=i > 0) for i, part in enumerate(parts))
    whole = request.image is None or request.strength == 1
    name = request.schedule or schedules.MODEL
    return SamplingPlan(sampler=sampler.name, schedule=name, segments=segments, whole=whole)


def _solver(sampler: Sampler, engine: Engine) -> Solver:
    """The sampler's function; an adaptive one looks at the arrays."""
    return partial(sampler.function, to_host=engine.numpy) if sampler.adaptive else sampler.function


def _sinusoids(config: UNetConfig, values: Sequence[float], channels: int) -> NDArray[np.float64]:
    """Of times and of sizes alike, [N, channels], in the model's own order."""
    return timesteps.unet_sinusoids(values, channels, cosines_first=config.flip_sin_to_cos, shift=config.freq_shift)
