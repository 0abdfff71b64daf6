"""Whether a picture fits and about how long it takes; what makes it fit is in `fit_options`."""

from __future__ import annotations

from statistics import median

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.memory.estimate import Estimate, steps_seconds
from qwenimg.common.memory.memory_plan import MemoryPlan
from qwenimg.common.pipeline.diffusion_model import DiffusionModel
from qwenimg.common.pipeline.fit_options import FitOptions, needs
from qwenimg.common.request.loras import Key, Loras
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.runtime import Change

MUCH_LESS = 0.8  # of what was planned: what is named where that did not suffice
# Of the matrices that the rate is measured with: a GPU's fill it, and a CPU's are those of small networks, soon done.
GPU_SIDE, CPU_SIDE, WARM_SIDE = 4096, 512, 256
RATE_SECONDS = 0.1  # that are measured


class Fit:
    """Of the pictures of one model, before anything is loaded for them."""

    def __init__(self, model: DiffusionModel):
        self.model, self.runtime, self.engine = model, model.runtime, model.runtime.engine
        self._rates: dict[str, float] = {}  # seconds of an operation, by dtype
        self._last: tuple[Request, MemoryPlan] | None = None

    def check(self, request: Request, model: DiffusionModel) -> MemoryPlan:
        """Return what the picture needs by `model`, which has its LoRAs. Raises DoesNotFit, with what would fit."""
        found = needs(model, request)
        self._last = (request, found)
        self.engine.expect(found.largest.peak)
        budget, stage = found.budget, found.largest
        if not found.fits(budget):
            raise DoesNotFit(
                f"{stage.title} takes {size_text(stage.peak)} in {self.runtime.precision.name}, "
                f"{self.runtime.room_text(budget)} ({size_text(stage.weights)} are weights); "
                f"{FitOptions(model, request, budget).sentence()}"
            )
        return found

    def ran_out(self) -> DoesNotFit:
        """Why the last picture ended: what was planned for it, and what takes much less."""
        if self._last is None:
            return DoesNotFit("memory ran out; close other programs")
        request, found = self._last
        stage = found.largest
        budget = min(self.runtime.room(found.loaded), int(MUCH_LESS * stage.peak))
        options = FitOptions(self.model, request, budget, limited=False)
        return DoesNotFit(
            f"memory ran out on {self.engine.device}: {stage.title} was planned with {size_text(stage.peak)} in "
            f"{self.runtime.precision.name} ({size_text(stage.weights)} are weights); "
            f"{'close other programs; ' if options.fitting else ''}{options.sentence()}"
        )

    def estimate(self, request: Request, model: DiffusionModel) -> Estimate:
        """Return memory and time of a picture by `model`, as for `check`. Raises DoesNotFit."""
        found, rate = self.check(request, model), self._seconds_of_operation()
        steps = steps_seconds(found, rate, self.engine.facts)
        return Estimate(
            memory=found.largest.peak,
            seconds=steps + found.decoding * rate,
            step=steps / self.model.plan(request).steps,
        )

    def _seconds_of_operation(self) -> float:
        """At the rate of a product in the transformer's dtype, the middle one of some: other programs slow the run down
        too. The first product of a process is much slower than the next."""
        dtype = self.runtime.precision.compute_dtype("transformer")
        if dtype not in self._rates:
            side = GPU_SIDE if self.engine.on_gpu else CPU_SIDE
            self.engine.product_seconds(WARM_SIDE, dtype)
            found: list[float] = []
            while sum(found) < RATE_SECONDS:
                found.append(self.engine.product_seconds(side, dtype))
            self._rates[dtype] = median(found) / (2 * side**3)
        return self._rates[dtype]


def with_loras(model: DiffusionModel, loras: Loras, request: Request, adapted: Key | None) -> DiffusionModel:
    """Return `model` with the LoRAs of `request`: where it has others, the `adapted` ones, a variant of which nothing
    is loaded."""
    if loras.key(request.lora, request.lora_mode) == adapted:
        return model
    variant = model.variant(Change())
    variant.adapt(loras.deltas(request.lora, request.lora_mode))
    return variant
