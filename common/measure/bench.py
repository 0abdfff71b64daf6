"""Timing of an image on this machine, stage by stage; the steady step is the slope between two numbers of steps."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.text import aligned
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step

PROMPT = "a red circle"
STAGES = ("import", "load", "text", "first step", "steady step", "decode", "save", "total")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The image to generate, and how often."""

    width: int
    height: int
    guidance: float
    few: int  # steps of the shorter run
    many: int  # steps of the longer run
    rounds: int  # of both runs, after the first image
    prompt: str = PROMPT
    seed: int = 0
    noise: str = ""  # a .npy file that replaces the seed's noise


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The measurements of one program. `total` is the time to the first image, of `Workload.few` steps."""

    arm: str  # the program's name
    device: str
    precision: str
    stages: dict[str, float]  # seconds by the names in STAGES
    processor_step: float  # seconds that all processors together spend on a steady step
    peak: int | None  # bytes, as the engine counts them
    versions: dict[str, str]
    load_average: float


def measure(
    open_pipeline: Callable[[], Pipeline], work: Workload, imported: float, begun: float
) -> tuple[Timings, Result, Pipeline]:
    """Measure `work` in this process; return the timings, the last image and the pipeline, which stays open.

    imported: seconds that importing the backend took. begun: `time.perf_counter()` at the start of the program.
    """
    start = time.perf_counter()
    pipe = open_pipeline()
    opening = time.perf_counter() - start
    first, steps, _ = draw(pipe, work, work.few)
    saving = _save_seconds(first)
    total = time.perf_counter() - begun
    loading = opening + sum(seconds for stage, seconds in first.timing.items() if stage.startswith(("load", "check")))
    slope, processor, last = steady_step(pipe, work)
    stages = {
        "import": imported,
        "load": loading,
        "text": first.timing.get("encode", 0.0),
        "first step": steps[0],
        "steady step": slope,
        "decode": last.timing.get("decode", 0.0),
        "save": saving,
        "total": total,
    }
    timings = Timings(
        arm=f"qwenimg, {pipe.backend}",
        device=pipe.device,
        precision=pipe.precision.name,
        stages=stages,
        processor_step=processor,
        peak=pipe.engine.peak_memory(),
        versions={"python": platform.python_version(), **pipe.engine.versions()},
        load_average=load_average(),
    )
    return timings, last, pipe


def draw(pipe: Pipeline, work: Workload, steps: int) -> tuple[Result, list[float], float]:
    """Generate an image; return it, the seconds of each step, and the processor seconds of the steps after the first.

    The first step also does the work of once per schedule, such as Qwen-Image's modulation.
    """
    seconds, ended = [], []
    size: dict[str, Any] = {"width": work.width, "height": work.height}
    first: dict[str, Any] = {"latents": np.load(work.noise)} if work.noise else {"seed": work.seed}
    first |= pipe.model.inputs.placeholder()
    for event in pipe.stream(work.prompt, guidance=work.guidance, steps=steps, **size, **first):
        if isinstance(event, Step):
            seconds.append(event.seconds)
            ended.append(time.process_time())
        else:
            result = event
    return result, seconds, ended[-1] - ended[0]


def steady_step(pipe: Pipeline, work: Workload) -> tuple[float, float, Result]:
    """Return the wall and processor seconds of a steady step, and the last image of `work.many` steps.

    Both are medians over the rounds of the slope between `few` and `many` steps, so nothing that happens once counts.
    """
    slopes, processor = [], []
    for _ in range(work.rounds):
        spent: dict[int, tuple[float, float]] = {}
        for steps in (work.few, work.many):
            result, seconds, used = draw(pipe, work, steps)
            spent[steps] = sum(seconds), used
        more = work.many - work.few
        slopes.append((spent[work.many][0] - spent[work.few][0]) / more)
        processor.append((spent[work.many][1] - spent[work.few][1]) / more)
    return median(slopes), median(processor), result


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def lines(arms: Sequence[Timings], work: Workload) -> list[str]:
    """Return a text table with a column for each program in `arms`."""
    first = arms[0]
    table: list[tuple[str, ...]] = [("", *(arm.arm for arm in arms))]
    for stage in STAGES:
        table.append((stage, *(f"{arm.stages[stage]:.3f} s" if stage in arm.stages else "" for arm in arms)))
    table.append(("step, of processors", *(f"{arm.processor_step:.3f} s" for arm in arms)))
    table.append(("peak memory", *("" if arm.peak is None else size_text(arm.peak) for arm in arms)))
    slope = f"steady step: slope of {work.few} to {work.many} steps, median of {counted(work.rounds, 'round')}"
    load = max(arm.load_average for arm in arms)
    busy = "; the machine is busy: only ratios of one run mean anything" if load > 0.5 * (os.cpu_count() or 1) else ""
    return [
        f"{first.device}, {first.precision}, {work.width}x{work.height}, guidance {work.guidance:g}; {slope}",
        *aligned(table),
        f"load average {load:.1f}{busy}",
    ]


def as_json(arms: Sequence[Timings], work: Workload, checks: Sequence[dict[str, Any]]) -> str:
    """Return the measurements as one JSON object. checks: the differences of shortcuts from their plain form."""
    return json.dumps({**asdict(work), "arms": [asdict(arm) for arm in arms], "checks": checks})


def _save_seconds(result: Result) -> float:
    """Return the seconds that writing `result` takes."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        result.save(Path(folder) / "image.png")
        return time.perf_counter() - start
