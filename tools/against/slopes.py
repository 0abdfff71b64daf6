"""The steady step of a peer: the slope between a short and a long run.

Imports the standard library alone, since a peer's Python may have nothing of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any


def steady_step(run: Callable[[int], tuple[list[float], Any]], job: Mapping[str, Any]) -> tuple[float, float, Any]:
    """Return the wall and processor seconds of a steady step, and the latents of the last long run.

    run: draws so many steps, returns the seconds of each and the latents. job: `few` and `many` steps, `rounds`.
    """
    slopes, processor = [], []
    for _ in range(job["rounds"]):
        spent = {}
        for steps in (job["few"], job["many"]):
            used = time.process_time()
            seconds, latents = run(steps)
            spent[steps] = sum(seconds), time.process_time() - used
        more = job["many"] - job["few"]
        slopes.append((spent[job["many"]][0] - spent[job["few"]][0]) / more)
        processor.append((spent[job["many"]][1] - spent[job["few"]][1]) / more)
    return median(slopes), median(processor), latents
