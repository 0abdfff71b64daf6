"""A training run as data, without a model: its options, its steps' learning rates, and the precision of each phase.

- A phase is a named span of steps with a dtype. The spans cover all steps; none is skipped.
- Presets: conservative keeps every phase in float32, default runs `predict` in bfloat16, aggressive all but `correct`.
- Everything random in step N is made from (seed, N), so a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.precision.precision import DTYPES, short
from qwenimg.common.training.optimizer import OPTIMIZERS

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
MAX_RANK = 1024
FINAL_RATE = 0.02  # of the peak, at the last step


def check_between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UsageError(f"{name} is {clean(value, 40)}; choose {least} to {most}")


def lora_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a LoRA's step `step` (from 0): up in a line over 5 % of the steps, constant, and down in a
    line to `FINAL_RATE` of the peak over the last 20 %."""
    warm_up, fall = max(1, steps // 20), max(1, steps // 5)
    rest = (steps - step) / fall
    return peak * min(1.0, (step + 1) / warm_up, max(FINAL_RATE, rest))


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The run of a LoRA.

    `batch` pictures make a step, one after the other; with `keep` pictures of what the model knows already, half of
    them are those. `facts` are what identifies the model and the pictures, such as hashes, of which a resumed run has
    the same. `stem` names the run's own files."""

    SAME: ClassVar[tuple[str, ...]] = ("facts", "rank", "batch", "seed", "rate", "optimizer")

    stem: Path
    steps: int = 1500
    rank: int = 16
    rate: float = 1e-4
    batch: int = 4
    seed: int = 0
    optimizer: str = "adamw"
    precision: str = "auto"
    shares: str | None = None
    save_every: int = 100
    checkpointing: bool = True
    text_encoder: bool = False  # whether the text encoders learn too
    resume: bool = False
    init: Path | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_between("steps", self.steps, 1, MAX_STEPS)
        check_between("rank", self.rank, 1, MAX_RANK)
        check_between("batch", self.batch, 1, MAX_BATCH)
        check_between("save-every", self.save_every, 1, MAX_STEPS)
        check_between("seed", self.seed, 0, 2**63 - 1)
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"--optimizer {clean(self.optimizer, 40)!r} is not one of {', '.join(OPTIMIZERS)}")
        if not 0 < self.rate <= 10:
            raise UsageError(f"rate is {self.rate}; choose a learning rate above 0, at most 10")
        plan_phases("fp32" if self.precision == "auto" else self.precision, self.steps, self.shares)


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
