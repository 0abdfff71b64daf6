"""The pace of previews: as often as they take at most a fiftieth of the time of the steps, or a number of times."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SHARE = 0.02  # of the steps' seconds


class PreviewPace:
    """A budget that steps fill and previews use up. The first preview is made at once, since its cost is not known."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._cost = 0.0  # seconds of the last preview
        self._earned = 0.0  # seconds

    def after(self, seconds: float, make: Callable[[], T]) -> T | None:
        """Call `make` if a preview is due after a step of `seconds`, and return its result; else None."""
        self._earned += SHARE * seconds
        if self._earned < self._cost:
            return None
        begun = self._clock()
        preview = make()
        self._cost, self._earned = self._clock() - begun, 0.0
        return preview


def is_due(step: int, steps: int, made: int, wanted: int) -> bool:
    """Return whether one more of `wanted` previews is due after a step, once `made` of them are there. They divide
    the steps into equal parts; none follows the last step."""
    return made < wanted and step < steps and step * (wanted + 1) >= steps * (made + 1)
