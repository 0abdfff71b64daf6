"""Flow-match models of Flux.1's blocks whose modulation depends on the time alone, so that all prompts share it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from qwenimg.common.networks.denoisers.flux_dit import PATCH
from qwenimg.common.numbers import packing
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.timesteps import TimeDtype
from qwenimg.common.parts import flux_blocks, vae
from qwenimg.common.parts.texts.states import ModelTexts
from qwenimg.common.pipeline.models.flow_model import FlowModel, FlowRun, ReferenceRun, shapes_of
from qwenimg.common.pipeline.steps.denoiser import Phase, phases
from qwenimg.common.pipeline.steps.inpaint import Initial
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.runtime.engine import Modulation
from qwenimg.common.runtime.residents import Residents
from qwenimg.common.runtime.runtime import Runtime
from qwenimg.common.runtime.stages import Stage


class TimeModulated(FlowModel):
    """Such a model, whose branches of guidance run in turn."""

    options = frozenset({"step_cache", "cached_calls"})
    texts: Any
    made_by: tuple[str, str]  # the start of the names that are in memory at once for modulation, and a layer of them

    def __init__(self, runtime: Runtime, checkpoint: Checkpoint, residents: Residents, texts: ModelTexts):
        halves = vae.scaled_halves(residents, checkpoint["vae"], samples=not self.inputs.fewest)
        super().__init__(runtime, checkpoint, residents, texts, halves)
        self.channels = self.vae.config.latent_channels

    @abstractmethod
    def modulate(self, transformer: Any, timesteps: Sequence[float], dtype: TimeDtype) -> Modulation:
        """Return the modulation of a schedule's timesteps."""

    def steps(self, request: Request, plan: SamplingPlan, shape: LatentShape, lengths: Sequence[int]) -> list[Stage]:
        """Return the stages of the transformer: the modulation, unless it is kept, and all steps."""
        sharing = self.sharing(request)
        tokens = sum(one.count for one in [shape, *self.reference_shapes(request)]) // PATCH**2
        peak = flux_blocks.step_peak(self.config, sharing.part(tokens) + max(lengths))
        activations = self.call_bytes(peak, tokens, tokens + max(lengths), sharing)
        operations = [flux_blocks.step_operations(self.config, tokens + length) for length in lengths]
        denoise = self.denoising(request, plan, activations, operations, [tokens] * len(lengths))
        timesteps, (start, layer) = self.timesteps(plan), self.made_by
        if self.modulations.has(timesteps):
            return [denoise]
        loaded = self.runtime.load_plan(denoise.component)
        rows = flux_blocks.modulation_rows(self.config, loaded, len(timesteps), layer)
        return [self.modulations.stage(denoise.component, rows, start, [denoise.splits[0].activations]), denoise]

    def start(self, request: Request, plan: SamplingPlan, shape: LatentShape) -> FlowRun:
        grid, branches = shape.grid(PATCH), self.guidance.branches(request)
        rows = {sigma: i for i, sigma in enumerate(plan.evaluated_sigmas())}  # of the modulation
        texts = self.texts.states(self.prompts(request))
        stages = self.steps(request, plan, shape, [text.shape[1] for text in texts])
        timesteps, dtype = self.timesteps(plan), self.runtime.precision.time_dtype()
        modulation, _ = self.modulations.get(
            timesteps, stages[0], lambda transformer, _: self.modulate(transformer, timesteps, dtype)
        )
        transformer, _ = self.residents.acquire(stages[-1])

        def make_phases(initial: Initial) -> list[Phase]:
            grids = [grid, *((one.shape[2] // PATCH, one.shape[3] // PATCH) for one in initial.references)]
            tokens = [self.engine.array(packing.pack(latents)) for latents in initial.references]

            def make_pass(positions: tuple[int, ...]) -> Pass:
                condition = transformer.condition(texts[positions[0]], grids, tokens)
                return Pass(transformer, condition, lambda x, sigma: (x, (modulation, rows[sigma])))

            return phases(plan, branches, 1, make_pass)

        return ReferenceRun(
            self,
            request,
            make_phases,
            shapes_of(texts, grid),
            packing=packing.squares(shape.rows, shape.columns),
        )
