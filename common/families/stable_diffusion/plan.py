"""How a Stable Diffusion picture is sampled: sampler and schedule by name or the model's own, what a picture that is
given leaves of the schedule, and where the refiner takes over."""

from __future__ import annotations

from functools import partial

from qwenimg.common.families.stable_diffusion.checkpoint import SDModel
from qwenimg.common.pipeline.plan import Plan, Solver, Stage
from qwenimg.common.pipeline.request import Request
from qwenimg.common.runtime.engine import Engine
from qwenimg.common.sampling import schedules, table
from qwenimg.common.sampling.table import Sampler


def plan(model: SDModel, request: Request, engine: Engine, *, refined: bool) -> Plan:
    """Raises UsageError."""
    config = model.scheduler
    sampler = table.find(request.sampler or schedules.sampler_of(config))
    grid = schedules.grid(config, sampler.name, request.schedule, request.steps, sdxl=model.sdxl)
    if request.image is not None:
        grid = schedules.part(grid, schedules.skipped(request.steps, request.strength))
    parts = schedules.split(grid, request.refine_at, config.num_train_timesteps) if refined else (grid,)
    solver = _solver(sampler, engine)
    stages = [Stage(grid=part, solver=solver, refines=i > 0) for i, part in enumerate(parts)]
    whole = request.image is None or request.strength == 1
    schedule = request.schedule or schedules.MODEL
    return Plan(sampler=sampler.name, schedule=schedule, stages=tuple(stages), whole=whole)


def _solver(sampler: Sampler, engine: Engine) -> Solver:
    """The sampler's function; an adaptive one looks at the arrays."""
    return partial(sampler.function, to_host=engine.numpy) if sampler.adaptive else sampler.function
