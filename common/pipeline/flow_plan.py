"""How a flow-match model's picture is sampled: sampler, schedule, and what a picture that is given leaves of it."""

from __future__ import annotations

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import UsageError
from qwenimg.common.pipeline.plan import Plan, Stage
from qwenimg.common.pipeline.request import Request
from qwenimg.common.sampling import table
from qwenimg.common.sampling.flow_match import FlowMatchConfig, flow_schedule
from qwenimg.common.sampling.types import Array, Grid

OWN = ("", "model")  # the model's schedule


def plan(config: FlowMatchConfig, request: Request, tokens: int) -> Plan:
    """For a picture of `tokens` latent tokens. Raises UsageError."""
    sampler = table.find(request.sampler or "euler")
    if not sampler.flow:
        raise UsageError(
            f"--sampler {sampler.name} has no form for flow models, such as Qwen-Image's; see qwenimg samplers"
        )
    if request.schedule not in OWN:
        raise UsageError(f"--schedule {request.schedule}: a flow model such as Qwen-Image has its own schedule only")
    sigmas = flow_schedule(config, request.steps, tokens)
    if request.image is not None:
        sigmas = sigmas[skipped(request.steps, request.strength) :]
    stage = Stage(grid=Grid(sigmas=sigmas, flow=True), solver=sampler.function)
    whole = request.image is None or request.strength == 1
    return Plan(sampler=sampler.name, schedule="model", stages=(stage,), whole=whole)


def skipped(steps: int, strength: float) -> int:
    """Steps that are left out where a picture is started from, as diffusers counts them. Raises UsageError."""
    left_out = int(max(steps - min(steps * strength, steps), 0))
    if left_out >= steps:
        raise UsageError(f"strength {strength:g} of {counted(steps, 'step')} leaves none; give more of either")
    return left_out


def asked(plan: Plan) -> tuple[float, ...]:
    """The noise levels at which the model will be asked, each once, in order: the samplers' coefficients depend on no
    array, so running them on a float tells."""
    recorder = _Recorder()
    for stage in plan.stages:
        for _ in stage.solver(0.0, stage.grid, recorder, lambda: 0.0):
            pass
    return tuple(recorder.sigmas)


class _Recorder:
    def __init__(self) -> None:
        self.sigmas: dict[float, None] = {}

    def __call__(self, x: Array, sigma: float) -> Array:
        self.sigmas[sigma] = None
        return 0.0

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        self.sigmas[sigma] = None
        return 0.0, 0.0
