"""Flux.1: text states and the prediction for the denoise loop.

dev is told its guidance, and predicts with it at once. A negative prompt needs a second prediction, by guidance of its
own (`true_cfg`). The branches run in turn, since each has its own modulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import Any

from qwenimg.common.families.flux import few_steps, lora_names, memory
from qwenimg.common.families.flux.texts import FluxTexts
from qwenimg.common.memory.memory import kept_bytes, scores
from qwenimg.common.networks.denoisers.flux_conditioning import guidance_row, time_rows
from qwenimg.common.networks.denoisers.flux_dit import PATCH, FluxConfig
from qwenimg.common.numbers import packing
from qwenimg.common.parts import vae
from qwenimg.common.parts.vae import Shape
from qwenimg.common.pipeline.denoiser import phases
from qwenimg.common.pipeline.flow_model import FlowModel, FlowRun, shapes_of
from qwenimg.common.pipeline.guidance import Guidance
from qwenimg.common.pipeline.plan import SamplingPlan
from qwenimg.common.pipeline.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Array, Engine, Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Change, Runtime
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights.lora_names import Names

LENGTHS = {True: 512, False: 256}  # tokens of T5, of a model with and without guidance


def _true_cfg(engine: Engine, request: Request, predictions: Sequence[Array]) -> Array:
    """Apply classifier-free guidance between two predictions that both have the model's own guidance."""
    conditional, unconditional = predictions
    return unconditional + request.true_cfg * (conditional - unconditional)


class Flux(FlowModel):
    """A Flux.1 model for `Pipeline`."""

    guidance = Guidance(formula=_true_cfg, name="true-cfg", scale=lambda request: request.true_cfg)
    options = frozenset({"step_cache", "cached_calls", "true_cfg"})
    pools_texts = True
    texts: FluxTexts
    config: FluxConfig

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint):
        residents, guided = Residents(runtime), checkpoint["transformer"].config.guidance_embeds
        texts = FluxTexts(residents, checkpoint, LENGTHS[guided])
        super().__init__(runtime, checkpoint, residents, texts, vae.scaled_halves(residents, checkpoint["vae"]))
        self.scale, self.channels = self.vae.config.scale, self.vae.config.latent_channels
        self.few_steps = few_steps.few_steps(guided=guided)

    @cached_property
    def lora_names(self) -> Names:
        return lora_names.names(self.checkpoint)

    def warnings(self, request: Request) -> list[str]:
        unguided = request.guidance and not self.config.guidance_embeds
        lines = ["guidance has no effect: this model was distilled without; give true-cfg"] if unguided else []
        return lines + super().warnings(request)

    def steps(self, request: Request, plan: SamplingPlan, shape: Shape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps."""
        branches, component = self.guidance.branches(request), self.checkpoint["transformer"]
        tokens, kept = shape[0] * shape[1] // PATCH**2, self.modulations.has(self._key(request, plan))
        longest = tokens + max(lengths)
        score_bytes = scores(self.config.num_attention_heads, 1, longest, self.engine.workspace.score_bytes)
        activations = self.runtime.call_bytes(component, memory.step_peak(self.config, longest) + score_bytes)
        activations += kept_bytes(self.config.dim, [tokens] * len(branches)) if request.caches else 0
        operations = [memory.step_operations(self.config, longest)] * len(branches)
        denoise = self.denoising(plan, branches, activations, operations, checked=kept)
        if kept:
            return [denoise]
        rows = len(branches) * len(plan.evaluated_sigmas())
        row_bytes = memory.modulation_rows(self.config, self.runtime.load_plan(component), rows)
        return [self.modulations.stage(component, row_bytes, "transformer_blocks.0.", [activations]), denoise]

    def _key(self, request: Request, plan: SamplingPlan) -> Hashable:
        """Return all that the modulation of a run depends on beside weights."""
        guidance = request.guidance if self.config.guidance_embeds else 0.0
        return self.timesteps(plan), guidance, tuple(branch.prompt for branch in self.guidance.branches(request))

    def variant(self, change: Change) -> Flux:
        return Flux(*self.runtime.changed(self.checkpoint, change, self.residents.weights))

    def start(self, request: Request, plan: SamplingPlan, shape: Shape) -> FlowRun:
        grid, branches = (shape[0] // PATCH, shape[1] // PATCH), self.guidance.branches(request)
        texts = self.texts.states([branch.prompt for branch in branches])
        stages = self.steps(request, plan, shape, [states.shape[1] for states, _ in texts])
        pooled = [vector for _, vector in texts]
        modulation = self.modulations.get(
            self._key(request, plan), stages[0], partial(self._modulation, request, plan, pooled)
        )
        transformer, _ = self.residents.enter(stages[-1])
        sigmas = plan.evaluated_sigmas()

        def make_pass(positions: tuple[int, ...]) -> Pass:
            [position] = positions
            rows = {sigma: position * len(sigmas) + i for i, sigma in enumerate(sigmas)}
            condition = transformer.condition(texts[position][0], grid)
            return Pass(transformer, condition, lambda x, sigma: (x, (modulation, rows[sigma])))

        return FlowRun(
            self,
            request,
            phases(plan, branches, 1, make_pass),
            shapes_of([states for states, _ in texts], grid),
            pack=packing.pack,
            unpack=partial(packing.unpack, h=shape[0], w=shape[1]),
        )

    def _modulation(
        self, request: Request, plan: SamplingPlan, pooled: Sequence[Array], transformer: Any
    ) -> Modulation:
        """Compute the modulation of a run with `pooled` text of its branches."""
        dtype = self.runtime.precision.time_dtype()
        times, guidance = time_rows(self.timesteps(plan), dtype), guidance_row(request.guidance, dtype)
        return transformer.modulate(times, guidance, pooled)
