"""The denoiser of a run for samplers: branches, guidance, mask, and the search for values that are not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.steps.evaluation import Evaluate, serial
from qwenimg.common.pipeline.steps.guidance import Branch
from qwenimg.common.pipeline.steps.inpaint import Blend
from qwenimg.common.pipeline.steps.plan import SamplingPlan
from qwenimg.common.pipeline.steps.step_cache import Pass, StepCache
from qwenimg.common.runtime.engine import Array, Control
from qwenimg.common.runtime.runtime import Runtime

RECENT = 4  # evaluations that are remembered, to repeat if a result is not finite: no step makes more


@dataclass(frozen=True, eq=False)
class Phase:
    """A range of noise levels with the same branches."""

    end_sigma: float  # the phase is sigma > end_sigma
    branches: int
    passes: Sequence[Pass]  # of an evaluation, each for one branch or for a batch of them


def phases(
    plan: SamplingPlan, branches: Sequence[Branch], size: int, make_pass: Callable[[tuple[int, ...]], Pass]
) -> list[Phase]:
    """Return the phases of a run with `size` branches in one batch. make_pass: takes the positions of branches."""
    cached = cache(make_pass)
    return [
        Phase(end_sigma, len(active), [cached(tuple(active[i : i + size])) for i in range(0, len(active), size)])
        for end_sigma, active in plan.stretches(branches)
    ]


class Denoiser:
    """A function that returns the denoised latents of x at a noise level, for one segment of one run."""

    def __init__(
        self,
        runtime: Runtime,
        title: str,
        phases: Sequence[Phase],
        denoised: Callable[[Array, float, Array], Array],
        combined: Callable[[Sequence[Array]], Array],
        *,
        blend: Blend | None = None,
        control: Callable[[Array, float], Control] | None = None,
        evaluate: Evaluate = serial,
        next_phases: Callable[[], Sequence[Phase]] | None = None,
    ):
        """Set the parts. phases: from the highest noise level on. denoised: makes the denoised latents of x,
        sigma and a prediction. combined: makes one prediction of the branches', the prompt's first. control:
        makes the changes by control networks for x and sigma, once for all branches. next_phases: called once for each
        evaluation, makes its phases where the texts change."""
        self.runtime, self.title, self.phases, self.denoised = runtime, title, phases, denoised
        self.combined, self.blend, self.control, self.evaluate = combined, blend, control, evaluate
        self.next_phases = next_phases
        self.cache: StepCache | None = None  # of the run
        self.recent: deque[tuple[Sequence[Pass], Array, float]] = deque(maxlen=RECENT)
        self.latest: Array = None  # the denoised latents of the last evaluation, for a preview

    def __call__(self, x: Array, sigma: float) -> Array:
        """Return the denoised latents, with guidance."""
        x = self._shown(x, sigma)
        self.latest = self._kept(self.denoised(x, sigma, self.combined(self.predictions(x, sigma))))
        return self.latest

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        """Return the denoised latents with guidance, and those of the unconditional branch alone (for CFG++)."""
        x = self._shown(x, sigma)
        predictions = self.predictions(x, sigma)
        self.latest = guided = self._kept(self.denoised(x, sigma, self.combined(predictions)))
        if len(predictions) == 1:
            return guided, guided
        return guided, self._kept(self.denoised(x, sigma, predictions[1]))

    def stepped(self, x: Array, step: int) -> Array:
        """Return the state that the sampler goes on from, for x after a step, counted from 0."""
        return x if self.blend is None else self.blend.stepped(x, step)

    def explain(self, step: int) -> NumericsError:
        """Run the last step's passes again with probes. Return an error that names component, block and operation.

        Ranks that share tokens would wait for each other there: the first to find its value computes no further."""
        group = self.runtime.engine.group
        if group is not None and group.shares_tokens:
            text = "a value that is not finite; on one device the error names its operation"
            return NumericsError(f"{self.title}, step {step}: {text}")
        again = (partial(self._again, one, x, sigma) for passes, x, sigma in self.recent for one in passes)
        return self.runtime.explain(self.title, step, again)

    def predictions(self, x: Array, sigma: float) -> list[Array]:
        """Return the prediction of each branch, the prompt's first."""
        if self.next_phases is not None:
            self.phases = self.next_phases()
        phase, control = self._phase(sigma), self._controlled(x, sigma)
        self.recent.append((phase.passes, x, sigma))
        if self.cache is None:
            results = self.evaluate(phase.passes, x, sigma, control)
        else:
            results = self.cache.predictions(phase.passes, x, sigma, control, self.evaluate)
        in_batch = len(results) < phase.branches
        return self.runtime.engine.split(results[0]) if in_batch else results

    def _again(self, one: Pass, x: Array, sigma: float) -> Array:
        return one(x, sigma, self._controlled(x, sigma))

    def _controlled(self, x: Array, sigma: float) -> Control:
        return None if self.control is None else self.control(x, sigma)

    def _phase(self, sigma: float) -> Phase:
        return next(phase for phase in self.phases if sigma > phase.end_sigma)

    def _shown(self, x: Array, sigma: float) -> Array:
        return x if self.blend is None else self.blend.shown(x, sigma)

    def _kept(self, denoised: Array) -> Array:
        return denoised if self.blend is None else self.blend.kept(denoised)
