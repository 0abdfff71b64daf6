"""The noise levels of Stable Cascade: a cosine of a time from 0 to 1, not of trained timesteps.

What is unusual: the share of the image never leaves 1e-4 to 1 - 1e-4, so that a run ends above 0, and its last step
adds no noise (P. Pernias et al., "Wuerstchen", 2024; the reference class of diffusers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling.discrete import DiscreteSchedule
from qwenimg.common.sampling.schedules import MODEL
from qwenimg.common.sampling.spacing import SPREADS
from qwenimg.common.sampling.steps import ancestral, toward
from qwenimg.common.sampling.types import MAX_STEPS, Array, DenoiseFunction, Noise, Schedule, States

CLASS_NAME = "DDPMWuerstchenScheduler"
SAMPLER = "ddpm"
LEAST, MOST = 1e-4, 1 - 1e-4  # shares of the image
_TABLE = 1000  # levels among which other schedules choose


@dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """The fields of `scheduler_config.json`."""

    class_name: ClassVar[str] = CLASS_NAME
    prediction_type: ClassVar[str] = "epsilon"
    scaler: float = 1.0
    s: float = 0.008

    def __post_init__(self) -> None:
        if self.scaler != 1:
            raise ModelError(f"scheduler: scaler is {self.scaler:g}: not supported; expected 1")
        if not 0 < self.s < 1:
            raise ModelError(f"scheduler: s is {self.s:g}; expected 0 to 1")

    def sigma(self, time: float) -> float:
        """Return the level at a time."""
        share = min(max((self._cosine(time) / self._cosine(0.0)) ** 2, LEAST), MOST)
        return math.sqrt((1.0 - share) / share)

    def timestep(self, sigma: float) -> float:
        """Return the time of a level; within 0 to 1 for those of no time."""
        share = self._cosine(0.0) / math.hypot(sigma, 1.0)
        return min(max(math.acos(share) * 2 / math.pi * (1 + self.s) - self.s, 0.0), 1.0)

    def _cosine(self, time: float) -> float:
        return math.cos((time + self.s) / (1 + self.s) * math.pi / 2)

    @property
    def levels(self) -> DiscreteSchedule:
        """Rising levels of times as far from each other, for schedules that choose from trained ones."""
        return _levels(self)


@cache
def _levels(config: CosineConfig) -> DiscreteSchedule:
    every = (config.sigma((i + 1) / _TABLE) for i in range(_TABLE))
    return DiscreteSchedule(sigmas=tuple(sorted(set(every))))


def parse_cosine(data: Mapping[str, object], source: Path | str) -> CosineConfig:
    """Return the noise levels in `data`, the contents of `scheduler_config.json`. Raises ModelError."""
    if (name := data.get("_class_name", CLASS_NAME)) != CLASS_NAME:
        raise ModelError(f"{clean(source)}: is of class {clean(name, 60)!r}; expected {CLASS_NAME!r}")
    return parse(CosineConfig, data, source=source)


def build(config: CosineConfig, sampler: str, schedule: str, steps: int) -> Schedule:
    """Return the levels of a run of `steps` steps by `sampler`: of even times, or by a rule of `SPREADS`. DDPM ends
    with the level of time 0 as its reference does, all others with 0. Raises UsageError."""
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"steps is {steps}; choose 1 to {MAX_STEPS}")
    if schedule in ("", MODEL):
        times = [1.0 - i / steps for i in range(steps)]
        sigmas = [config.sigma(time) for time in times]
    elif schedule in SPREADS:
        sigmas = SPREADS[schedule](config.levels, steps)
        if len(set(sigmas)) < steps:
            raise UsageError(f"{counted(steps, 'step')}: too many for --schedule {schedule}; choose fewer")
        times = [config.timestep(sigma) for sigma in sigmas]
    else:
        known = ", ".join((MODEL, *SPREADS))
        raise UsageError(f"--schedule {clean(schedule, 40)} has no form for this model; it has {known}")
    last = config.sigma(0.0) if sampler == SAMPLER else 0.0
    return Schedule(
        sigmas=(*sigmas, last),
        timesteps=tuple(times),
        initial=math.hypot(sigmas[0], 1.0),
        final=1.0 / math.hypot(last, 1.0),
    )


def ddpm(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DDPM (J. Ho et al., 2020) to a last level above 0 without noise in the last step, for which one is
    drawn all the same: the next run goes on with the same numbers as in the reference."""
    for sigma, sigma_next in schedule.pairs():
        down, _, up = ancestral(schedule, sigma, sigma_next)
        x = toward(x, denoise(x, sigma), sigma, down)
        drawn = noise()
        x = x if sigma_next == schedule.sigmas[-1] else x + up * drawn
        x = yield x
