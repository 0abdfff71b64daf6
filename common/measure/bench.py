"""What a picture takes on this machine, measured: stages apart, the steady step as the slope between two numbers of
steps, and that step's share of the rate of its own products, measured in the same run."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.text import aligned
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.kernels import Kernel

PROMPT = "a red circle"
STAGES = ("import", "load", "text", "first step", "steady step", "decode", "save", "total")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is drawn, and how often."""

    width: int
    height: int
    guidance: float
    few: int  # steps of the shorter run
    many: int
    rounds: int  # times that both are run after the first picture
    prompt: str = PROMPT
    seed: int = 0
    noise: str = ""  # a file of it, in the place of the seed's


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one arm. `stages`: seconds, by `STAGES`; the total is that of the first picture, of `few` steps."""

    arm: str
    device: str
    precision: str
    stages: dict[str, float]
    processor_step: float  # seconds of all processors in a steady step
    peak: int | None  # bytes, as the engine counts them
    share: float | None = None  # of the rate of the step's own products, run alone
    rate: float | None = None  # that rate, operations a second
    versions: dict[str, str]
    load_average: float


def measure(
    opened: Callable[[], Pipeline], ask: Ask, imported: float, begun: float
) -> tuple[Measured, Result, Pipeline]:
    """One arm in this process. imported: seconds that importing the backend took; begun: when all began."""
    start = time.perf_counter()
    pipe = opened()
    opening = time.perf_counter() - start
    first, steps, _ = drawn(pipe, ask, ask.few)
    saving = _saved(first)
    total = time.perf_counter() - begun
    loading = opening + sum(seconds for stage, seconds in first.timing.items() if stage.startswith(("load", "check")))
    slope, processor, last = steady(pipe, ask)
    stages = {
        "import": imported,
        "load": loading,
        "text": first.timing.get("encode", 0.0),
        "first step": steps[0],
        "steady step": slope,
        "decode": last.timing["decode"],
        "save": saving,
        "total": total,
    }
    made = Measured(
        arm=f"qwenimg, {pipe.backend}",
        device=pipe.device,
        precision=pipe.precision.name,
        stages=stages,
        processor_step=processor,
        peak=pipe.engine.peak_memory(),
        versions={"python": platform.python_version(), **pipe.engine.versions()},
        load_average=load_average(),
    )
    return made, last, pipe


def drawn(pipe: Pipeline, ask: Ask, steps: int) -> tuple[Result, list[float], float]:
    """A picture, the seconds of each of its steps, and those of all processors in the steps behind the first: before
    that one is also what comes once, as the modulation of a new schedule."""
    seconds, ended = [], []
    size: dict[str, Any] = {"width": ask.width, "height": ask.height}
    start: dict[str, Any] = {"latents": np.load(ask.noise)} if ask.noise else {"seed": ask.seed}
    for event in pipe.stream(ask.prompt, guidance=ask.guidance, steps=steps, **size, **start):
        if isinstance(event, Step):
            seconds.append(event.seconds)
            ended.append(time.process_time())
        else:
            result = event
    return result, seconds, ended[-1] - ended[0]


def steady(pipe: Pipeline, ask: Ask) -> tuple[float, float, Result]:
    """Seconds of a step by the clock and of all processors: medians of the slopes between `few` and `many` steps, which
    are run in turn; and the last picture of `many` steps."""
    slopes, processor = [], []
    for _ in range(ask.rounds):
        taken: dict[int, tuple[float, float]] = {}
        for steps in (ask.few, ask.many):
            result, seconds, used = drawn(pipe, ask, steps)
            taken[steps] = sum(seconds), used
        more = ask.many - ask.few
        slopes.append((taken[ask.many][0] - taken[ask.few][0]) / more)
        processor.append((taken[ask.many][1] - taken[ask.few][1]) / more)
    return median(slopes), median(processor), result


def share_of_products(engine: Engine, kernels: Sequence[Kernel], calls: int, seconds: float) -> tuple[float, float]:
    """The share of a step of `seconds` that its products and attention would take at the rate of its largest product,
    run alone now; and that rate."""
    products = [kernel for kernel in kernels if kernel.kind == "product"]
    largest = max(products, key=lambda kernel: kernel.flops)
    columns = largest.shape[-1]
    rows = prod(largest.shape) // columns
    inner = round(largest.flops / (2 * rows * columns))
    rate = largest.flops / min(engine.linear_seconds(rows, inner, columns, largest.dtype) for _ in range(6))
    return calls * sum(kernel.flops for kernel in kernels) / rate / seconds, rate


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def lines(rows: Sequence[Measured], ask: Ask) -> list[str]:
    """The table, an arm a column."""
    first = rows[0]
    table: list[tuple[str, ...]] = [("", *(row.arm for row in rows))]
    for stage in STAGES:
        table.append((stage, *(f"{row.stages[stage]:.3f} s" if stage in row.stages else "" for row in rows)))
    table.append(("step, of processors", *(f"{row.processor_step:.3f} s" for row in rows)))
    table.append(("peak memory", *("" if row.peak is None else size_text(row.peak) for row in rows)))
    shares = ("" if row.share is None else f"{row.share:.2f} of {(row.rate or 0) / 1e9:,.0f} GFLOP/s" for row in rows)
    table.append(("share of product rate", *shares))
    slope = f"steady step: slope of {ask.few} to {ask.many} steps, median of {counted(ask.rounds, 'round')}"
    load = max(row.load_average for row in rows)
    busy = "; the machine is busy: only ratios of one run mean anything" if _busy(load) else ""
    return [
        f"{first.device}, {first.precision}, {ask.width}x{ask.height}, guidance {ask.guidance:g}; {slope}",
        *aligned(table),
        f"load average {load:.1f}{busy}",
    ]


def as_json(rows: Sequence[Measured], ask: Ask) -> str:
    return json.dumps({**asdict(ask), "arms": [asdict(row) for row in rows]})


def _busy(load: float) -> bool:
    return load > 0.5 * (os.cpu_count() or 1)


def _saved(result: Result) -> float:
    """Seconds of writing it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        result.save(Path(folder) / "picture.png")
        return time.perf_counter() - start
