"""How a request is sampled: stretches of a schedule, each with its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling.types import Denoiser, Grid, Noise

Solver: TypeAlias = Callable[[Array, Grid, Denoiser, Noise], Iterator[Array]]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of the schedule that one denoiser walks: all of it, or the base's or the refiner's part."""

    grid: Grid
    solver: Solver
    refines: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a request is sampled. `sigmas` are those of all stages, for the recipe."""

    sampler: str
    schedule: str
    stages: tuple[Stage, ...]
    whole: bool = True  # from pure noise on, not from a picture with some

    @property
    def steps(self) -> int:
        return sum(len(stage.grid.sigmas) - 1 for stage in self.stages)

    @property
    def sigmas(self) -> tuple[float, ...]:
        first, *others = (stage.grid.sigmas for stage in self.stages)
        return first + tuple(sigma for sigmas in others for sigma in sigmas[1:])
