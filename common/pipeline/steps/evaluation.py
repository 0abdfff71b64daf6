"""The ways to evaluate a network at one noise level: all branches in a batch, one after the other, or each by ranks of
its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from qwenimg.common.runtime.engine import Array, Control
from qwenimg.common.runtime.group import Group, Sharing

Predict: TypeAlias = Callable[[Array, float, Control], Array]
"""A function of x, sigma and the control networks' changes that returns the result of one pass."""
Evaluate: TypeAlias = Callable[[Sequence[Predict], Array, float, Control], list[Array]]
"""A function of the passes of an evaluation, x, sigma and the control networks' changes that returns the results of
all passes."""


def serial(passes: Sequence[Predict], x: Array, sigma: float, control: Control = None) -> list[Array]:
    """Compute one pass after the other; a batch of branches is one pass."""
    return [one(x, sigma, control) for one in passes]


def strategy(group: Group | None, sharing: Sharing) -> Evaluate:
    """Return the strategy of a run that is divided by `sharing`, and set this division in `group`."""
    if group is None:
        return serial
    group.share(sharing)
    return serial if sharing.branches == 1 else parallel(group, sharing.branches)


def parallel(group: Group, sets: int) -> Evaluate:
    """Return a strategy in which each of `sets` of ranks computes one of the passes, and all exchange the results. With
    fewer passes than sets, several sets compute the same pass and all use the first set's result, so that x stays equal
    on all ranks, bit for bit."""

    def evaluate(passes: Sequence[Predict], x: Array, sigma: float, control: Control = None) -> list[Array]:
        results: list[Array] = []
        for first in range(0, len(passes), sets):
            mine = passes[min(first + group.branch, len(passes) - 1)]
            results += group.gather(mine(x, sigma, control))
        return results[: len(passes)]

    return evaluate
