"""Flow-match models whose modulation depends on pooled texts: it has separate rows for each prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from qwenimg.common.parts.texts.padded_texts import SeparateTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights.loras.lora import Deltas
from qwenimg.common.weights.plan import LoadPlan


class PooledFlowModel(FlowModel):
    """A flow-match model with modulation by pooled texts; its branches of guidance run one after the other."""

    texts: SeparateTexts

    @abstractmethod
    def modulation_rows(self, plan: LoadPlan, rows: int) -> int:
        """Return the bytes of `rows` rows of modulation. plan: the transformer's, as it is in memory."""

    def schedule(self, request: Request, plan: SamplingPlan) -> Hashable:
        """Return the key of a run's modulation: all that it depends on besides weights and texts."""
        return self.timesteps(plan)

    def with_modulation(self, request: Request, plan: SamplingPlan, denoise: Stage) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and `denoise`, all steps."""
        prompts = self.pooled_keys(request)
        if self.modulations.has(self.schedule(request, plan), prompts):
            return [denoise]
        rows = self.modulation_rows(self.runtime.load_plan(denoise.component), len(plan.evaluated_sigmas()))
        counts = self.modulations.counts(rows, len(prompts), len(self.texts.others(prompts)))
        activations = [split.activations for split in denoise.splits]
        modulation = self.modulations.stage(
            denoise.component, rows, "transformer_blocks.0.", activations, counts, denoise.co_resident
        )
        return [modulation, replace(denoise, checked=False)]

    def modulate(
        self,
        request: Request,
        plan: SamplingPlan,
        stage: Stage,
        compute: Callable[[Any, Sequence[Any]], Modulation],
    ) -> tuple[Modulation, dict[Hashable, int]]:
        """Return the modulation of a run, a kept one or the result of compute(transformer, keys) in `stage`, and the
        first row of each key of a pooled text in it."""
        needed = self.pooled_keys(request)
        announced = self.texts.pooled_already(self.texts.others(needed))
        modulation, prompts = self.modulations.get(self.schedule(request, plan), stage, compute, needed, announced)
        return modulation, {prompt: i * len(plan.evaluated_sigmas()) for i, prompt in enumerate(prompts)}

    def adapt(self, deltas: Deltas) -> None:
        before = self.checkpoint.texts
        super().adapt(deltas)
        if not all(before[name].plan.same_deltas(text.plan) for name, text in self.checkpoint.texts.items()):
            self.modulations.clear()
            if self.controls is not None:
                self.controls.clear()

    def pooled_keys(self, request: Request) -> list[Hashable]:
        """Return the different keys of the branches' pooled texts: their prompts, unless a family changes the
        texts."""
        return list(dict.fromkeys(branch.prompt for branch in self.guidance.branches(request)))
