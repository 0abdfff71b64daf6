"""What the allocator of the pretend accelerator counts of a picture, stage by stage, and the plan of the picture."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import qwenimg
from qwenimg import backends
from qwenimg.common.pipeline import fit_options
from support.pretend_device import MEMORY, pretend_engine, pretending


def counted(
    load: Mapping[str, Any], draw: Mapping[str, Any], starts: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan as `qwenimg plan --json` has it, and of each stage the bytes at its peak. `load` and `draw`: keywords;
    `starts`: with what a stage is told to begin."""
    with pretending(), patch.object(backends, "load", lambda name: pretend_engine()):
        gc.collect()
        idle, peaks, last = MEMORY.now, dict[str, int](), [""]

        def mark(stage: str) -> None:
            peaks[last[0]] = max(peaks.get(last[0], 0), MEMORY.peak - idle)
            last[0], MEMORY.peak = stage, MEMORY.now

        def told(kind: str, text: str) -> None:
            mark(next((stage for start, stage in starts.items() if text.startswith(start)), last[0]))

        pipe = qwenimg.load(**load, backend="cpu", notify=told)
        needs = fit_options.plan_memory(pipe.model, pipe.check(**draw))
        add = pipe.runtime.clock.add

        def timed(what: str, seconds: float) -> None:
            add(what, seconds)
            if what == "modulate":
                mark("denoise")

        pipe.runtime.clock.add = timed  # type: ignore[method-assign]
        pipe(**draw)
        mark("end")
        pipe.close()
    plan = {"peak_bytes": needs.largest.peak, "stages": [stage.as_json() for stage in needs.stages]}
    return plan, {"stages": {name: peak for name, peak in peaks.items() if name}}
