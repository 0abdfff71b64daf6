"""A training run as data, without a model: its options, its steps' learning rates, and the precision of each phase.

- A phase is a named span of steps with a dtype. The spans cover all steps; none is skipped.
- Presets: conservative keeps every phase in float32, default runs `predict` in bfloat16, aggressive all but `correct`.
- The wheel calls none of this yet: `tools/train.py` trains the built-in model with it, and LoRA training will.
- Everything random in step N is made from (seed, N), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.precision.precision import DTYPES, short

PHASES = ("warm-up", "full", "predict", "correct")
SHARES = {"warm-up": 10.0, "full": 20.0, "predict": 60.0, "correct": 10.0}
"""Percent of all steps, unless --phases says otherwise."""
PRESETS: dict[str, tuple[str, ...]] = {
    "conservative": (),
    "default": ("predict",),
    "aggressive": ("warm-up", "full", "predict"),
}
"""The phases that run in bfloat16."""
RELATIVE_MEMORY = {"float32": 1.0, "bfloat16": 0.5, "float16": 0.5}
"""The memory of a step in each dtype, relative to the same step in float32."""

MAX_STEPS = 100_000_000
MAX_BATCH = 65_536
FINAL_RATE = 0.02  # of the peak, at the last step
WARM_UP = 200  # steps until the peak, or 5 % of a shorter run


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One stage of a training run.

    `stage` names its files; `rate` is the peak learning rate; `sizes` are (width, height) in pixels, taken in turn by
    the steps. A resumed run must have the options `SAME` in common with its checkpoint; steps and precision may
    change."""

    SAME: ClassVar[tuple[str, ...]] = ("stage", "batch", "sizes", "seed", "accumulate")

    stage: str
    out: Path
    steps: int
    batch: int = 64
    sizes: tuple[tuple[int, int], ...] = ((128, 128),)
    seed: int = 0
    rate: float = 1e-3
    precision: str = "auto"
    shares: str | None = None
    init: Path | None = None
    resume: bool = False
    threads: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    save_every: int = 500

    def __post_init__(self) -> None:
        check_between("steps", self.steps, 1, MAX_STEPS)
        check_between("batch", self.batch, 1, MAX_BATCH)
        check_between("accumulate", self.accumulate, 1, self.batch)
        check_between("save-every", self.save_every, 1, MAX_STEPS)
        check_between("threads", self.threads or 1, 1, 1024)
        check_between("seed", self.seed, 0, 2**63 - 1)
        if not 0 < self.rate <= 1:
            raise UsageError(f"rate is {self.rate}; choose a learning rate above 0, at most 1")
        for width, height in self.sizes:
            if width % 16 or height % 16 or not 32 <= min(width, height) <= max(width, height) <= 2048:
                raise UsageError(
                    f"size {clean(width, 40)}x{clean(height, 40)}: sides must be multiples of 16 from 32 to 2048"
                )
        plan_phases("fp32" if self.precision == "auto" else self.precision, self.steps, self.shares)


def check_between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{name} is {clean(value, 40)}; choose {least} to {most}")


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of the step `step` (from 0): up in a line, down on half a cosine to `FINAL_RATE` of the peak."""
    warm_up = max(1, min(WARM_UP, steps // 20))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


# Phases


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """Steps `start` to `stop` - 1, computed in `dtype` (float32, bfloat16 or float16)."""

    name: str
    dtype: str
    start: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.start


def plan_phases(precision: str, steps: int, shares: str | None = None) -> tuple[TrainingPhase, ...]:
    """Return the phases of a run: `precision` is a preset or one dtype for all, `shares` a text for `parse_shares`.

    The spans are rounded so that they add up to `steps`; one may be empty in a short run. Raises UsageError.
    """
    percent, dtypes = parse_shares(shares) if shares else (SHARES, {})
    chosen = _preset(precision) | dtypes
    total, done, start = sum(percent.values()), 0.0, 0
    phases = []
    for name in PHASES:
        done += percent[name]
        stop = round(steps * done / total)
        phases.append(TrainingPhase(name=name, dtype=chosen[name], start=start, stop=stop))
        start = stop
    return tuple(phases)


def phase_at(phases: Sequence[TrainingPhase], step: int) -> TrainingPhase:
    """Return the phase of `step`."""
    return next(phase for phase in phases if phase.start <= step < phase.stop)


def _preset(precision: str) -> dict[str, str]:
    if precision in DTYPES:
        return dict.fromkeys(PHASES, DTYPES[precision])
    if precision not in PRESETS:
        known = ", ".join(("auto", *PRESETS, *DTYPES))
        raise UsageError(f"--precision {clean(precision, 40)!r} is not one of {known}")
    return {name: "bfloat16" if name in PRESETS[precision] else "float32" for name in PHASES}


def parse_shares(text: str) -> tuple[dict[str, float], dict[str, str]]:
    """Return the percent of the steps, and the dtypes that differ from the preset's, by phase.

    Syntax: `warm-up=10,full=20,predict=60:bf16,correct=10`; a phase that is left out has no steps. Raises UsageError.
    """
    percent, dtypes = dict.fromkeys(PHASES, 0.0), {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        number, _, dtype = value.partition(":")
        if name not in PHASES:
            raise UsageError(f"--phases: {clean(name, 40)!r} is not a phase; the phases are {', '.join(PHASES)}")
        percent[name] = _share(name, number)
        if dtype:
            if dtype not in DTYPES:
                raise UsageError(f"--phases: {clean(dtype, 40)!r} is not one of {', '.join(DTYPES)}")
            dtypes[name] = DTYPES[dtype]
    if not 99.9 <= sum(percent.values()) <= 100.1:
        raise UsageError(f"--phases: the shares add up to {sum(percent.values()):g} %; they must add up to 100")
    return percent, dtypes


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise UsageError(f"--phases: the share of {name} is {clean(text, 40)!r}; expected a percentage from 0 to 100")
    return value


def memory_estimate(phases: Sequence[TrainingPhase]) -> float:
    """Return the memory of the run, averaged over its steps, as a share of the same run in float32 throughout.

    A step in 16 bits counts half: 10/20/60/10 % under the default preset is 0.1 + 0.2 + 0.6 * 0.5 + 0.1 = 0.7.
    """
    return weighted(phases, RELATIVE_MEMORY)


def weighted(phases: Sequence[TrainingPhase], by_dtype: dict[str, float]) -> float:
    """Return the mean over all steps of the value in `by_dtype` for each step's dtype."""
    return sum(phase.steps * by_dtype[phase.dtype] for phase in phases) / sum(phase.steps for phase in phases)


def describe_phases(phases: Sequence[TrainingPhase]) -> str:
    """Return the phases in one line: `warm-up 0-99 fp32, full 100-299 fp32, ...`."""
    return ", ".join(f"{p.name} {p.start}-{p.stop - 1} {short(p.dtype)}" for p in phases if p.steps)
