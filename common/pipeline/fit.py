"""The memory check and the time estimate of an image; `fit_options` searches for changes that make it fit."""

from __future__ import annotations

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.memory.estimate import Estimate, steps_seconds
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.pipeline import second_pass
from qwenimg.common.pipeline.controls import Controls
from qwenimg.common.pipeline.fit_options import FitOptions, plan_memory
from qwenimg.common.pipeline.models.diffusion_model import DiffusionModel
from qwenimg.common.precision import machines
from qwenimg.common.request.loras import Key, Loras
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.paper import Rate
from qwenimg.common.runtime.rates import decoder_layer, denoiser_layer
from qwenimg.common.runtime.runtime import Change

MUCH_LESS = 0.8  # the share of the planned bytes within which options are suggested if the plan did not suffice


class FitCheck:
    """The memory check and the time estimate of one model's images, before anything is loaded for them."""

    def __init__(self, model: DiffusionModel):
        self.model, self.runtime, self.engine = model, model.runtime, model.runtime.engine
        self._last: tuple[Request, MemoryPlan] | None = None

    def check(self, request: Request, model: DiffusionModel) -> MemoryPlan:
        """Return the memory plan of an image by `model`, which has its LoRAs. Raises DoesNotFit, with options that
        would fit."""
        plan = plan_memory(model, request)
        self._last = (request, plan)
        self.engine.expect(plan.largest.peak)
        budget, stage = plan.budget, plan.largest
        if not plan.fits(budget):
            raise DoesNotFit(
                f"{stage.title} takes {size_text(stage.peak)} in {self.runtime.precision.name}, "
                f"{self.runtime.budget_text(budget)} ({size_text(stage.weights)} are weights); "
                f"{FitOptions(model, request, budget).message()}"
            )
        return plan

    @property
    def spare(self) -> int:
        """The bytes that the plan of the last image leaves."""
        return 0 if self._last is None else self._last[1].budget - self._last[1].largest.peak

    def ran_out(self) -> DoesNotFit:
        """Return the error for an allocation that failed: the plan of the last image, and options that take much
        less."""
        if self._last is None:
            return DoesNotFit("memory ran out; close other programs")
        request, plan = self._last
        stage = plan.largest
        budget = min(self.runtime.budget(plan.loaded), int(MUCH_LESS * stage.peak))
        options = FitOptions(self.model, request, budget, limited=False)
        return DoesNotFit(
            f"memory ran out on {self.engine.device}: {stage.title} was planned with {size_text(stage.peak)} in "
            f"{self.runtime.precision.name} ({size_text(stage.weights)} are weights); "
            f"{'close other programs; ' if options.fitting_changes else ''}{options.message()}"
        )

    def estimate(self, request: Request, model: DiffusionModel) -> Estimate:
        """Return memory and time of an image by `model`. Raises DoesNotFit like `check`."""
        plan = self.check(request, model)
        expected = seconds(model, plan)
        assert expected is not None, "an engine knows its rates"
        steps, decoding = expected
        count = second_pass.steps(self.model, request)
        return Estimate(memory=plan.largest.peak, seconds=steps + decoding, step=steps / count)


def seconds(model: DiffusionModel, plan: MemoryPlan) -> tuple[float, float] | None:
    """Return the seconds of all steps and of decoding, as every command tells them: by the published rate of a known
    GPU, else by the rates that were measured here. None on paper for a device that is not known."""
    engine, precision = model.runtime.engine, model.runtime.precision
    layers = denoiser_layer(precision), decoder_layer(precision)
    rate: Rate | None = engine.rate
    if engine.on_gpu and (machine := machines.of_device(engine.device)) is not None:
        denoising, decoding = machine.rate(layers[0][1], plan.quantized), machine.rate(layers[0][1])
    elif rate is None:
        return None
    else:
        denoising = rate(*layers[0], plan.small_denoiser)
        decoding = rate(*layers[1], plan.small_decoder)
    return steps_seconds(plan, 1 / denoising, engine.facts), plan.decoding / decoding


def with_inputs(
    model: DiffusionModel, loras: Loras, controls: Controls, request: Request, adapted: Key | None
) -> DiffusionModel:
    """Return `model` with the LoRAs and the control networks of `request`: an unloaded variant if it has others now.
    adapted: the LoRAs that it has now."""
    asked = controls.loras(request)
    if loras.key(*asked) == adapted and controls.are_given(model, request):
        return model
    variant = model.variant(Change())
    variant.adapt(loras.deltas(*asked))
    controls.give(variant, request)
    return variant
