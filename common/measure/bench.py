"""What a picture takes on this machine, measured: stages apart, the steady step as the slope between two numbers of
steps, and the share of that step which its own products take, measured in the same run."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.text import aligned
from qwenimg.common.measure.published import Subject
from qwenimg.common.numbers.sizes import render_size
from qwenimg.common.pipeline.pipeline import Pipeline
from qwenimg.common.pipeline.result import Result, Step
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.runtime.kernels import Case, Kernel

PROMPT = "a red circle"
BATCH = 0.005  # seconds of a product that are timed at once, so that waiting for a device is little of it
TIMES = 5  # that they are timed
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
    share: float | None = None  # of a steady step that its own products take, run alone
    rate: float | None = None  # at which they run, operations a second
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


def cases(pipe: Pipeline, subject: Subject, ask: Ask) -> list[Case]:
    """Of each call of the denoiser in a step what it is asked, with the prompt's own tokens, as a run of one step
    shows them."""
    case, calls = subject.step(*render_size(ask.width, ask.height), ask.guidance > 1)
    texts: list[tuple[int, ...]] = []

    def look(operation: str, path: str, result: Any) -> None:
        if path == subject.text_layer:
            texts.append(tuple(result.shape))

    with pipe.engine.observe(look):
        drawn(pipe, ask, 1)
    return [replace(case, branches=shape[0], text=shape[1]) for shape in texts] or [case] * calls


def share_of_products(
    engine: Engine, kernels: Sequence[Kernel], parameters: int, seconds: float
) -> tuple[float, float]:
    """The share of a step of `seconds` that its products, convolutions and attentions take, each distinct one timed
    alone now; and their rate. parameters: of the network."""
    products = [kernel for kernel in kernels if kernel.kind != "memory"]
    alike = Counter((kernel.name, kernel.dtype, kernel.given, kernel.shape) for kernel in products)
    one = {(kernel.name, kernel.dtype, kernel.given, kernel.shape): kernel for kernel in products}
    taken = sum(count * _alone(engine.repeating(one[key], parameters)) for key, count in alike.items())
    return taken / seconds, sum(kernel.flops for kernel in products) / taken


def _alone(repeated: Callable[[int], float]) -> float:
    """Seconds of one run: the least of a few timings, after a run that pays what comes once."""
    repeated(1)
    count = max(1, ceil(BATCH / repeated(1)))
    return min(repeated(count) for _ in range(TIMES)) / count


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
