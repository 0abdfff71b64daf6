"""The sampling of a request: segments of a schedule, each sampled with one denoiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import Any, TypeAlias

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.pipeline.steps.guidance import Branch
from qwenimg.common.request.request import Request
from qwenimg.common.runtime.engine import Array
from qwenimg.common.sampling import schedules, table
from qwenimg.common.sampling.discrete import DiffusionConfig
from qwenimg.common.sampling.flow_match import SPREADS, USUAL, FlowLevels, FlowMatchConfig, flow_schedule, gone
from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.types import DenoiseFunction, Noise, Schedule, States

OWN = ("", "model")  # the model's schedule
Solver: TypeAlias = Callable[[Array, Schedule, DenoiseFunction, Noise], States]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of the schedule that one denoiser samples: all of it, or the base's or the refiner's part; or a schedule
    of its own, from the noise of latents of another `shape`, for which those before it are a picture that is seen."""

    schedule: Schedule
    solver: Solver
    refines: bool = False
    shape: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """The sampler, schedule and segments of a request. `sigmas`: of all segments, for the recipe."""

    sampler: str
    schedule: str
    segments: tuple[Segment, ...]
    whole: bool = True  # True: from pure noise on, not from an image with noise

    @property
    def steps(self) -> int:
        return sum(len(segment.schedule.sigmas) - 1 for segment in self.segments)

    @property
    def sigmas(self) -> tuple[float, ...]:
        first, *others = (segment.schedule.sigmas for segment in self.segments)
        return first + tuple(sigma for sigmas in others for sigma in sigmas[1:])

    def stretches(self, branches: Sequence[Branch]) -> list[tuple[float, list[int]]]:
        """Return, for each range of steps with the same branches, the noise level at its end and the positions of its
        branches."""
        count, bounds = self.steps, [self._bounds(branch) for branch in branches]
        ends = sorted({bound for pair in bounds for bound in pair} - {0})
        return [
            (
                self.sigmas[end] if end < count else -1.0,  # the last range has no end
                [i for i, (first, last) in enumerate(bounds) if first < end <= last],
            )
            for end in ends
        ]

    def passes(self, branches: Sequence[Branch], size: int = 1, segment: int | None = None) -> int:
        """Return the calls of the network in the run, or in one `segment` of it, with `size` branches in one batch."""
        stretches = self.stretches(branches)
        evaluated = self._evaluated if segment is None else [self._evaluated[segment]]
        active = (
            next((len(active) for end, active in stretches if sigma > end), 0)
            for sigmas in evaluated
            for sigma in sigmas
        )
        return sum(ceil(count / size) for count in active)

    def _bounds(self, branch: Branch) -> tuple[int, int]:
        """Return the number of steps before the first that computes `branch`, and up to the last one. Step i of n does
        while i / n is within the branch's share of the steps, and no more noise is gone than it allows."""
        first, last = (ceil(share * self.steps) for share in branch.steps)
        reached = sum(gone(sigma) <= branch.until for sigma in self.sigmas[: self.steps])
        return min(first, reached), min(last, reached)

    def evaluated_sigmas(self) -> tuple[float, ...]:
        """Return the noise levels of all evaluations, each once, in order. The coefficients of samplers that are not
        adaptive depend on no array, so running them on a float shows the levels."""
        return tuple(dict.fromkeys(sigma for sigmas in self._evaluated for sigma in sigmas))

    @property
    def evaluations(self) -> int:
        """The number of evaluations, each of one x at one noise level."""
        return sum(map(len, self._evaluated))

    @cached_property
    def _evaluated(self) -> list[list[float]]:
        """The noise level of each evaluation, for each segment, recorded by running the sampler on a float. An adaptive
        sampler chooses its own steps; the schedule's steps with three evaluations each stand for them."""
        if table.find(self.sampler).adaptive:
            return [[sigma for sigma in segment.schedule.sigmas[:-1] for _ in range(3)] for segment in self.segments]
        recorders = []
        for segment in self.segments:
            recorders.append(_Recorder())
            for _ in unchanged(segment.solver(0.0, segment.schedule, recorders[-1], lambda: 0.0)):
                pass
        return [recorder.sigmas for recorder in recorders]


class _Recorder:
    def __init__(self) -> None:
        self.sigmas = list[float]()

    def __call__(self, x: Array, sigma: float) -> Array:
        self.sigmas.append(sigma)
        return 0.0

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        self(x, sigma)
        return 0.0, 0.0


# Flow-match models


def flow_plan(config: FlowMatchConfig, request: Request, tokens: int, levels: FlowLevels = USUAL) -> SamplingPlan:
    """Return the sampling plan for an image of `tokens` latent tokens. Raises UsageError."""
    sampler = table.find(request.sampler or config.sampler)
    if not sampler.flow:
        raise UsageError(f"--sampler {sampler.name} has no form for flow models such as this one; see qwenimg samplers")
    spread = SPREADS.get(request.schedule)
    if not spread and request.schedule not in (*OWN, schedules.LIGHTNING):
        known = ", ".join((schedules.MODEL, *SPREADS))
        name = clean(request.schedule, 40)
        raise UsageError(
            f"--schedule {name} has no form for flow models such as this one; they have {known}, lightning"
            f"{'; what ComfyUI calls simple is model' if name == 'simple' else ''}"
        )
    if spread and config.sample_sigmas:
        raise UsageError(
            f"--schedule {request.schedule}: this model has its own noise levels only; leave the option out"
        )
    chosen = config.lightning() if request.schedule == schedules.LIGHTNING else config
    sigmas = flow_schedule(chosen, request.steps, tokens, levels, spread)
    if request.starts_from_picture:
        sigmas = sigmas[_skipped(request.steps, request.strength) :]
    segment = Segment(schedule=Schedule(sigmas=sigmas, flow=True), solver=sampler.function)
    whole = not request.starts_from_picture or request.strength == 1
    return SamplingPlan(sampler=sampler.name, schedule=request.schedule or "model", segments=(segment,), whole=whole)


def _skipped(steps: int, strength: float) -> int:
    """Return the number of steps that an initial image leaves out, counted like diffusers."""
    left_out = int(max(steps - min(steps * strength, steps), 0))
    if left_out >= steps:
        raise UsageError(f"strength {strength:g} of {steps} steps leaves none; give more steps or more strength")
    return left_out


# Diffusion models


def diffusion_plan(
    config: DiffusionConfig,
    request: Request,
    to_host: Callable[[Array], Any],
    *,
    sdxl: bool = False,
    refine_at: float | None = None,
) -> SamplingPlan:
    """Plan the run: the sampler and the schedule, by name or the model's own, the part of the schedule that an initial
    image leaves, and the segment of a refiner from the share `refine_at` on. sdxl: see `schedules.build`; to_host: for
    adaptive samplers. Raises UsageError."""
    sampler = table.find(request.sampler or schedules.sampler_of(config))
    schedule = schedules.build(config, sampler.rule, request.schedule, request.steps, sdxl=sdxl)
    if request.starts_from_picture:
        schedule = schedules.part(schedule, schedules.skipped(request.steps, request.strength))
    parts: tuple[Schedule, ...] = (schedule,)
    if refine_at is not None:
        parts = schedules.split(schedule, refine_at, config.num_train_timesteps)
    solver = partial(sampler.function, to_host=to_host) if sampler.adaptive else sampler.function
    segments = tuple(Segment(schedule=part, solver=solver, refines=i > 0) for i, part in enumerate(parts))
    whole = not request.starts_from_picture or request.strength == 1
    name = request.schedule or schedules.MODEL
    return SamplingPlan(sampler=sampler.name, schedule=name, segments=segments, whole=whole)
