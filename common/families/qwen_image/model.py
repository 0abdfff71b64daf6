"""Qwen-Image: text states, modulation and velocity for the denoise loop.

Text is encoded and its encoder freed before the transformer is loaded, so the peak of memory is the largest component
and not the sum. Inputs that depend on neither step nor latent are made once per run, the modulation once per schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import numpy as np

from qwenimg.common.families.qwen_image import few_steps, lora_names, memory
from qwenimg.common.memory.memory import scores
from qwenimg.common.networks import qwen_conditioning
from qwenimg.common.numbers import packing, sizes
from qwenimg.common.parts import vae
from qwenimg.common.parts.template_texts import TemplateTexts
from qwenimg.common.parts.vae import Shape, VAEHalves
from qwenimg.common.pipeline import inpaint
from qwenimg.common.pipeline.denoiser import Denoiser, phases
from qwenimg.common.pipeline.guidance import Guidance, cfg_with_norm, passes
from qwenimg.common.pipeline.inpaint import Initial, Latents
from qwenimg.common.pipeline.plan import SamplingPlan, Segment, flow_plan
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.prompts.qwen import Template
from qwenimg.common.request.request import MULTIPLE, Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Split, Stage
from qwenimg.common.weights.lora import Deltas
from qwenimg.common.weights.lora_names import Names

KEPT_SCHEDULES = 2  # schedules whose modulation is kept: 442 MB for 50 steps of the 20 B model
BATCHED_TOKENS = 1024  # images of at most this many tokens leave a GPU idle: both branches of guidance go in one batch


class QwenImage:
    """A Qwen-Image model for `Pipeline`."""

    batch_guidance: bool | None = None  # both branches in one batch: always, never, or (None) where it pays
    multiple = MULTIPLE
    guidance = Guidance(formula=cfg_with_norm)
    options = frozenset({"step_cache", "cached_calls"})
    sees_mask = False

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, template: Template):
        self.runtime, self.engine, self.checkpoint = runtime, runtime.engine, checkpoint
        self.schedule_config = checkpoint.scheduler
        self.config, vae_config = checkpoint["transformer"].config, checkpoint["vae"].config
        self.scale, self.channels = vae_config.scale, vae_config.z_dim
        self.few_steps = few_steps.few_steps(str(checkpoint.source))
        self.residents = Residents(runtime)
        self.texts = TemplateTexts(self.residents, checkpoint, template)
        statistics = vae.standardized(vae_config.latents_mean, vae_config.latents_std)
        self.vae = VAEHalves(self.residents, checkpoint["vae"], vae_config.base_dim, statistics)
        self._modulations: dict[tuple[float, ...], Modulation] = {}

    @cached_property
    def lora_names(self) -> Names:
        return lora_names.names(self.checkpoint)

    def plan(self, request: Request) -> SamplingPlan:
        rows, columns = sizes.render_size(request.width, request.height, MULTIPLE)
        return flow_plan(self.schedule_config, request, rows * columns // MULTIPLE**2)

    def warnings(self, request: Request) -> list[str]:
        lines, seen = [], self.texts.template.seen
        for name, branch in zip(("prompt", "negative prompt"), self.guidance.branches(request), strict=False):
            if lost := self.texts.fill(branch.prompt).lost:
                lines.append(f"the {name} is cut: the model sees its first {seen} tokens, not the last {lost}")
        return lines

    def stages(self, request: Request, plan: SamplingPlan, shape: Shape, counted: bool = True) -> list[Stage]:
        prompts, template = [branch.prompt for branch in self.guidance.branches(request)], self.texts.template
        longest = template.dropped + template.seen
        lengths = [len(self.texts.fill(prompt).ids) if counted else longest for prompt in prompts]
        seen = [template.used(length) for length in lengths]
        return [
            *([] if request.image is None else [self.vae.encoding(shape)]),
            *([] if self.texts.has(prompts) else [self.texts.encoding(max(lengths))]),
            *self.steps(request, plan, shape[0] * shape[1] // self.config.patch_size**2, seen),
            self.vae.decoding(shape),
        ]

    def steps(self, request: Request, plan: SamplingPlan, tokens: int, seen: Sequence[int]) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps. `tokens`: those of
        the image; `seen`: those of each branch's text."""
        branches, timesteps = self.guidance.branches(request), self.timesteps(plan)
        count, longest = len(branches), tokens + max(seen)
        cache = memory.kept_bytes(self.config, count, tokens) if request.caches else 0
        operations = (memory.step_operations(self.config, tokens + text) for text in seen)
        per_evaluation = sum(branch.share * one for branch, one in zip(branches, operations, strict=True))
        denoise = Stage(
            name="denoise",
            resident="transformer",
            component=self.checkpoint["transformer"],
            splits=tuple(
                Split(
                    activations=self._step_bytes(size, longest) + cache,
                    size=size,
                    passes=plan.evaluations * passes(branches, size),
                )
                for size in self._batches(count, tokens)
            ),
            checked=timesteps in self._modulations,
            operations=plan.evaluations * per_evaluation,
        )
        if timesteps in self._modulations:
            return [denoise]
        return [self._modulating(len(timesteps), [split.activations for split in denoise.splits]), denoise]

    def _modulating(self, count: int, steps: Sequence[int]) -> Stage:
        """Return the stage that computes the modulation of `count` timesteps. It leaves enough memory for the steps
        after it, which take `steps` bytes in each of their splits."""
        component = self.checkpoint["transformer"]
        plan = self.runtime.load_plan(component)
        rows = memory.modulation_rows(self.config, plan, count)
        block = self.runtime.call_bytes(component, memory.block_bytes(plan), once=True)
        return Stage(
            name="modulation",
            resident="transformer",
            component=component,
            splits=tuple(Split(activations=rows + block, required=rows + max(step, block)) for step in steps),
            calls_blocks=False,
            results=rows,
        )

    def timesteps(self, plan: SamplingPlan) -> tuple[float, ...]:
        """Return the timesteps of the transformer's evaluations, in their order."""
        return tuple(self.schedule_config.timestep(sigma) for sigma in plan.evaluated_sigmas())

    def _step_bytes(self, branches: int, tokens: int) -> int:
        """Return the bytes of a step with `branches` in one batch, of `tokens` image and text tokens each."""
        score_bytes = scores(self.config.num_attention_heads, branches, tokens, self.engine.workspace.score_bytes)
        activations = memory.step_peak(self.config, branches, tokens) + score_bytes
        return self.runtime.call_bytes(self.checkpoint["transformer"], activations)

    def _batches(self, count: int, tokens: int) -> list[int]:
        """Return how many of the `count` branches of guidance may go in one batch, the preferred number first.

        Small images leave a GPU idle between kernels, so both branches go together if memory allows. Large ones gain
        nothing, and texts of different length would need a mask that keeps attention from its fastest kernel."""
        if self.batch_guidance is not None:
            return [count if self.batch_guidance else 1]
        gains = self.engine.on_gpu and tokens <= BATCHED_TOKENS
        return list(dict.fromkeys([count, 1])) if gains else [1]

    def variant(self, change: Change) -> QwenImage:
        return QwenImage(*self.runtime.changed(self.checkpoint, change, self.residents.weights), self.texts.template)

    def check_weights(self) -> None:
        self.vae.check_weights()

    def announce(self, prompts: Sequence[str], clip_skip: int = 0) -> None:
        self.texts.announce(prompts)

    def adapt(self, deltas: Deltas) -> None:
        before, self.checkpoint = self.checkpoint, self.checkpoint.with_deltas(deltas)
        now = self.checkpoint
        self.texts.renew(now.texts)
        if not before["transformer"].plan.when(ONCE).same_deltas(now["transformer"].plan):
            self._modulations.clear()
        if not before["transformer"].plan.same_deltas(now["transformer"].plan):
            self.residents.adapt("transformer", now["transformer"])

    @contextmanager
    def prepare(self, request: Request, plan: SamplingPlan, shape: Shape) -> Iterator[QwenRun]:
        patch = self.config.patch_size
        grid = (1, shape[0] // patch, shape[1] // patch)
        run = QwenRun(self, request, plan, grid)
        try:
            yield run
        finally:
            run.close()

    # Transformer

    def modulation(self, timesteps: tuple[float, ...], stage: Stage) -> Modulation:
        """Return the modulation of a schedule, computed in `stage` unless it is kept from one of the last schedules."""
        modulation = self._modulations.pop(timesteps, None)
        if modulation is None:
            transformer, _ = self.residents.enter(stage)
            features = qwen_conditioning.time_rows(self.config, timesteps, self.runtime.precision.time_dtype())
            self.runtime.notify("stage", "computing modulation")
            while len(self._modulations) >= KEPT_SCHEDULES:
                del self._modulations[next(iter(self._modulations))]
            with self.runtime.clock.timed("modulate"):
                modulation = transformer.modulate(features)
        self._modulations[timesteps] = modulation
        return modulation

    def forget(self) -> None:
        self.texts.forget()
        self._modulations.clear()

    def close(self) -> None:
        self.texts.close()
        self._modulations.clear()
        self.residents.free()
        self.checkpoint.close()


# One image


class QwenRun:
    """A run for one request; the denoised latents are x - sigma velocity. `grid`: frames, rows and columns in
    tokens."""

    def __init__(self, model: QwenImage, request: Request, plan: SamplingPlan, grid: tuple[int, int, int]):
        self.model, self.request, self.grid = model, request, grid
        self.rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}  # of the modulation
        branches, tokens = model.guidance.branches(request), grid[1] * grid[2]
        texts = model.texts.states([branch.prompt for branch in branches])
        stages = model.steps(request, plan, tokens, [text.shape[1] for text in texts])
        self.modulation = model.modulation(model.timesteps(plan), stages[0])
        self.transformer, split = model.residents.enter(stages[-1])
        self.phases = phases(
            plan, branches, split.size or len(texts), lambda positions: self._pass([texts[i] for i in positions])
        )
        self.shapes = {
            "text": ", ".join(str(list(text.shape)) for text in texts),
            "tokens": f"{grid[1]} x {grid[2]} = {tokens}",
        }

    def denoiser(self, segment: Segment, initial: Initial) -> Denoiser:
        return Denoiser(
            self.model.runtime,
            "transformer",
            self.phases,
            lambda x, sigma, velocity: x - sigma * velocity,
            partial(self.model.guidance.combined, self.model.engine, self.request),
            blend=inpaint.blend(initial, segment.schedule, self.array),
        )

    def _pass(self, texts: Sequence[Array]) -> Pass:
        """Return the pass of the transformer for a batch of branches."""
        condition = self.transformer.condition(texts, [self.grid])
        return Pass(self.transformer, condition, lambda x, sigma: (x, (self.modulation, self.rows[sigma])))

    def array(self, latents: Latents) -> Array:
        return self.model.engine.array(packing.pack(latents))

    def latents(self, x: Array) -> Latents:
        patch = self.model.config.patch_size
        shape = self.grid[1] * patch, self.grid[2] * patch
        return packing.unpack(self.model.engine.numpy(x), *shape).astype(np.float32)

    def close(self) -> None:
        """Free the run's arrays on the device, before the VAE decodes."""
        self.phases, self.modulation = [], None
        del self.transformer  # which may be freed for the VAE
