"""First-block cache (`--step-cache`): calls of the model that reuse its deeper blocks' output from an earlier call.

A call, as in `--cached-calls`, is one evaluation: one x at one noise level, in as many passes through the network as
its branches need. The update of the first block predicts how much the others' work differs. It is compared with the
last call that was computed whole, for the prompt's branch, and all branches follow: a call reuses the stored output if
the update differs by at most T of its size; T is the value of `--step-cache`. Sizes are mean absolute values, of each
row in float32 and of all rows in float64. Where ranks share the run, those of the prompt's branch decide for all.

Backends round differently, so a difference that close to T may fall on either side, with this rule as with any other. A
recipe therefore lists the cached calls, and a repeated image follows the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from qwenimg.common.base.amounts import counted
from qwenimg.common.pipeline.steps.evaluation import Evaluate
from qwenimg.common.request import cached_calls
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array, Condition, Control, DenoiserNetwork, Engine, TimeStep


@dataclass(frozen=True)
class Pass:
    """One call of the network: for a branch of guidance or a batch of them. inputs: its latents and step from x and
    sigma."""

    network: DenoiserNetwork
    condition: Condition
    inputs: Callable[[Array, float], tuple[Array, TimeStep]]

    def __call__(self, x: Array, sigma: float, control: Control = None) -> Array:
        more = () if control is None else (control,)
        return self.network.predict(*self.inputs(x, sigma), self.condition, *more)


@dataclass(frozen=True)
class _Step:
    phase: int  # numbered from 1
    seconds: float
    calls: int
    reused: int


class StepCache:
    """The cache of one run. Calls are counted from 1, over all its segments."""

    def __init__(self, engine: Engine, request: Request):
        self.engine, options = engine, request.family_options
        self.threshold = options.step_cache
        self.listed = cached_calls.parse(options.cached_calls) if options.cached_calls else None
        self.calls, self.reused = 0, list[int]()
        self._steps: list[_Step] = []
        self._phase = 0  # of the present passes
        self.free()

    def free(self) -> None:
        """Drop the stored outputs: the next call is computed whole."""
        self._passes: Sequence[Pass] = ()
        self._kept: Mapping[int, Array] = {}  # by the numbers of the passes that this rank computes
        self._change: tuple[Array, float] = (None, 0.0)  # the update of the first block, and its size
        self._reuses: bool | None = None  # whether the present call reuses them, once that is decided

    def predictions(
        self, passes: Sequence[Pass], x: Array, sigma: float, control: Control, evaluate: Evaluate
    ) -> list[Array]:
        """Return the predictions of `passes`, all under one `control`, by the strategy `evaluate`. Passes of another
        segment or phase start without stored outputs."""
        if passes is not self._passes:
            self.free()
            self._passes, self._phase = passes, self._phase + 1
        self.calls, self._reuses = self.calls + 1, None
        outputs, threshold = dict[int, Array](), None if self.listed is not None else self.threshold

        def predicted(number: int, one: Pass, x: Array, sigma: float, control: Control) -> Array:
            call = partial(one, x, sigma, control)
            prediction, outputs[number] = one.network.skipping.run(call, partial(self._reused, number), threshold)
            return prediction

        numbered = [partial(predicted, number, one) for number, one in enumerate(passes)]
        results = evaluate(numbered, x, sigma, control)
        self._kept = outputs
        return results

    def _reused(self, number: int, change: Array) -> Array | None:
        """Return the stored output of pass `number` if the call reuses it; `change`: its first block's update."""
        if self._reuses is None:  # the first pass of this rank: all ranks are at theirs
            self._reuses = self._decided(change[:1])
        return self._kept[number] if self._reuses else None

    def _decided(self, change: Array) -> bool:
        """Return whether a call is skipped, given the relative `change` of its first block's update."""
        if self.listed is not None:
            reuses = bool(self._kept) and self.calls in self.listed
        else:
            before, size = self._change
            reuses = bool(self._kept) and self._size(change - before) <= self.threshold * size
            if not reuses:
                self._change = change, self._size(change)
        self.reused += [self.calls] if reuses else []
        return reuses

    def _size(self, change: Array) -> float:
        rows, group = self.engine.row_sizes(change), self.engine.group
        sums = [float(rows.sum(dtype=np.float64)), float(rows.size)]
        total, count = sums if group is None else group.summed(sums)
        return total / count

    def timed(self, seconds: float) -> None:
        """Add the time of a finished step."""
        calls = self.calls - sum(step.calls for step in self._steps)
        reused = len(self.reused) - sum(step.reused for step in self._steps)
        self._steps.append(_Step(self._phase, seconds, calls, reused))

    def saved(self) -> float:
        """Return the seconds saved, compared with whole steps of the same branches."""
        total = 0.0
        for step in self._steps:
            whole = [s.seconds / s.calls for s in self._steps if s.phase == step.phase and s.calls and not s.reused]
            if step.reused and whole:
                total += median(whole) * step.calls - step.seconds
        return total

    def recorded(self) -> dict[str, str]:
        """Return the entries of the recipe: the cached calls, and their effect."""
        effect = f"{len(self.reused)} of {counted(self.calls, 'call')} cached, about {self.saved():.1f} s saved"
        return {"cached_calls": cached_calls.text(self.reused), "step_cache_effect": effect}
