"""The model of a run as samplers see it: its branches, their guidance, the mask, and why a result was not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.guidance import Branch
from qwenimg.common.pipeline.inpaint import Blend
from qwenimg.common.pipeline.plan import SamplingPlan
from qwenimg.common.pipeline.step_cache import Pass, StepCache
from qwenimg.common.runtime.engine import Array
from qwenimg.common.runtime.runtime import Runtime

CALLS = 4  # that are remembered, to look at when a result is not finite: no step makes more


@dataclass(frozen=True, eq=False)
class Phase:
    """A stretch of the noise levels in which the same branches are computed."""

    above: float  # it lies above this noise level
    branches: int
    passes: Sequence[Pass]  # calls of the model, each for one branch or for a batch of them


def phases(
    plan: SamplingPlan, branches: Sequence[Branch], size: int, call: Callable[[tuple[int, ...]], Pass]
) -> list[Phase]:
    """Return the phases of a run with `size` branches in one batch. call: makes the pass for the branches in these
    positions."""
    made = cache(call)
    return [
        Phase(above, len(active), [made(tuple(active[i : i + size])) for i in range(0, len(active), size)])
        for above, active in plan.stretches(branches)
    ]


class Denoiser:
    """The image that the model sees in x at a noise level, for one segment of one run."""

    def __init__(
        self,
        runtime: Runtime,
        title: str,
        phases: Sequence[Phase],
        denoised: Callable[[Array, float, Array], Array],
        combined: Callable[[Sequence[Array]], Array],
        *,
        blend: Blend | None = None,
    ):
        """phases: from the highest noise level on. denoised: the image from x, sigma and a prediction. combined: the
        prediction from those of the branches, the prompt's first."""
        self.runtime, self.title, self.phases, self.denoised = runtime, title, phases, denoised
        self.combined, self.blend = combined, blend
        self.cache: StepCache | None = None  # of the run
        self.calls: deque[tuple[Array, float]] = deque(maxlen=CALLS)

    def __call__(self, x: Array, sigma: float) -> Array:
        """Return the image with guidance."""
        x = self._shown(x, sigma)
        return self._kept(self.denoised(x, sigma, self.combined(self._predictions(x, sigma))))

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        """Return the image with guidance, and as predicted without the prompt (for CFG++)."""
        x = self._shown(x, sigma)
        predictions = self._predictions(x, sigma)
        guided = self._kept(self.denoised(x, sigma, self.combined(predictions)))
        if len(predictions) == 1:
            return guided, guided
        return guided, self._kept(self.denoised(x, sigma, predictions[1]))

    def explain(self, step: int) -> NumericsError:
        """Runs the calls of the last step again with probes: component, block and operation of what is not finite."""
        again = (partial(call, x, sigma) for x, sigma in self.calls for call in self._phase(sigma).passes)
        return self.runtime.explain(self.title, step, again)

    def _predictions(self, x: Array, sigma: float) -> list[Array]:
        self.calls.append((x, sigma))
        phase = self._phase(sigma)
        if self.cache is None:
            results = [call(x, sigma) for call in phase.passes]
        else:
            results = self.cache.predictions(phase.passes, x, sigma)
        in_batch = len(results) < phase.branches
        return self.runtime.engine.split(results[0]) if in_batch else results

    def _phase(self, sigma: float) -> Phase:
        return next(phase for phase in self.phases if sigma > phase.above)

    def _shown(self, x: Array, sigma: float) -> Array:
        return x if self.blend is None else self.blend.shown(x, sigma)

    def _kept(self, denoised: Array) -> Array:
        return denoised if self.blend is None else self.blend.kept(denoised)
