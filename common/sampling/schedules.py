"""Grids of noise levels for diffusion models: which levels of its training a run passes.

- "model" is what diffusers' scheduler for that sampler does with the model's configuration. There are four rules:
  that of schedulers in whole timesteps (DDIM), of those in sigma (Euler), of those in lambda, which take one step
  more and leave out the last (DPM-Solver), and that of distilled models, which keep to their teacher's steps (LCM).
- The others spread the levels in their own way over all that the model was trained on, and end with 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling.discrete import DiffusionConfig
from qwenimg.common.sampling.spacing import AYS_SD, AYS_SDXL, LARGEST, SPREADS, ays, even_in_log, even_in_root
from qwenimg.common.sampling.types import Grid

MAX_STEPS = 1000
MODEL = "model"
SCHEDULES = (MODEL, *SPREADS, "ays")
_GAMMA = 0.3  # TCD's

_STEPWISE = ("ddim", "ddpm", "pndm")
_LOGWISE = ("dpmpp_2m", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "unipc", "deis", "sa_solver")
_DISTILLED = ("lcm", "tcd")
_FROM_AFAR = ("ddim", "ddpm", *_DISTILLED)  # exact from any level, however far
_ENDS_ABOVE_ZERO = ("deis", "sa_solver")

_SAMPLER_OF: Mapping[str, str] = MappingProxyType(
    {
        "PNDMScheduler": "pndm",
        "DDIMScheduler": "ddim",
        "DDPMScheduler": "ddpm",
        "EulerDiscreteScheduler": "euler",
        "EulerAncestralDiscreteScheduler": "euler_ancestral",
        "HeunDiscreteScheduler": "heun",
        "LMSDiscreteScheduler": "lms",
        "KDPM2DiscreteScheduler": "dpm2",
        "KDPM2AncestralDiscreteScheduler": "dpm2_ancestral",
        "DPMSolverSDEScheduler": "dpmpp_sde",
        "UniPCMultistepScheduler": "unipc",
        "DEISMultistepScheduler": "deis",
        "SASolverScheduler": "sa_solver",
        "LCMScheduler": "lcm",
        "TCDScheduler": "tcd",
    }
)
_DPM_SOLVER: Mapping[tuple[str, str, int], str] = MappingProxyType(
    {
        ("dpmsolver++", "midpoint", 2): "dpmpp_2m",
        ("sde-dpmsolver++", "midpoint", 2): "dpmpp_2m_sde",
        ("sde-dpmsolver++", "heun", 2): "dpmpp_2m_sde_heun",
        ("sde-dpmsolver++", "heun", 3): "dpmpp_3m_sde",
    }
)


def sampler_of(config: DiffusionConfig) -> str:
    """The name of the sampler that the model's configuration means. Raises ModelError if it is not built."""
    found = _SAMPLER_OF.get(config.class_name)
    if config.class_name == "DPMSolverMultistepScheduler":
        found = _DPM_SOLVER.get((config.algorithm_type, config.solver_type, config.solver_order))
    orders = (config.predictor_order, config.corrector_order) if found == "sa_solver" else (config.solver_order,)
    if found in ("unipc", "deis", "sa_solver") and set(orders) != {2}:
        found = None
    if found == "unipc" and (config.solver_type != "bh2" or not config.predict_x0):
        found = None
    if found is None:
        what = f"{config.class_name} with algorithm_type {clean(config.algorithm_type, 30)!r}"
        what += f", solver_type {clean(config.solver_type, 30)!r}, solver_order {config.solver_order}"
        raise ModelError(f"scheduler: {what} is not built; choose another with --sampler")
    return found


def check_name(schedule: str) -> None:
    """Raises UsageError unless there is a schedule of that name."""
    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {clean(schedule, 40)!r}; choose one of {', '.join(SCHEDULES)}")


def grid(config: DiffusionConfig, sampler: str, schedule: str, steps: int, *, sdxl: bool = False) -> Grid:
    """The levels of a run of `steps` steps; `sdxl` chooses the table of "ays". Raises UsageError."""
    most = min(MAX_STEPS, config.num_train_timesteps)
    if not 1 <= steps <= most:
        raise UsageError(f"steps is {steps}; choose 1 to {most}")
    levels = config.levels
    if schedule in ("", MODEL):
        return _finished(config, sampler, steps, *_own(config, sampler, steps))
    check_name(schedule)
    if schedule == "ays":
        sigmas = ays(AYS_SDXL if sdxl else AYS_SD, steps)
    else:
        sigmas = SPREADS[schedule](levels, steps)
    last = len(levels.sigmas) - 1.0
    times = [last if sigma >= LARGEST else levels.timestep(sigma) for sigma in sigmas]
    return _finished(config, sampler, steps, [*sigmas, 0.0], times)


def _own(config: DiffusionConfig, sampler: str, steps: int) -> tuple[list[float], list[float]]:
    """Levels and times of the model's own schedule: one level more than times."""
    levels = config.levels
    if sampler in _DISTILLED:
        times = _distilled_times(config, steps)
        return [*map(levels.sigma, times), levels.sigmas[0] if sampler == "tcd" else 0.0], times
    logwise = sampler in _LOGWISE
    times = _times(config, steps, whole=logwise or sampler in _STEPWISE, leave_out=logwise)
    if times[0] > len(levels.sigmas) - 1 or len(set(times)) < steps:
        raise UsageError(f"{counted(steps, 'step')}: too many for this schedule; choose fewer, or --schedule simple")
    sigmas = [levels.sigma(time) for time in times]
    if config.rescale_betas_zero_snr and sampler not in _FROM_AFAR:
        farthest = max(LARGEST, math.sqrt(2) * levels.sigmas[-2])
        sigmas = [min(sigma, farthest) for sigma in sigmas]
    if config.use_karras_sigmas or config.use_exponential_sigmas:
        spread = even_in_root if config.use_karras_sigmas else even_in_log
        ends = (levels.sigmas[-1], levels.sigmas[0]) if logwise else (sigmas[0], sigmas[-1])
        sigmas = spread(*ends, steps)
        times = [levels.timestep(sigma) for sigma in sigmas]
        if config.use_karras_sigmas and (logwise or sampler in ("dpm2", "dpm2_ancestral")):
            times = [float(round(time)) for time in times]
    return [*sigmas, _last_level(config, sampler, steps, times[-1])], times


def _last_level(config: DiffusionConfig, sampler: str, steps: int, time: float) -> float:
    lowest = config.levels.sigmas[0]
    if sampler in _STEPWISE and sampler != "ddpm":
        before = time - config.num_train_timesteps // steps
        if config.timestep_spacing == "leading" and before >= 0:
            return config.levels.sigma(before)
        return 0.0 if config.set_alpha_to_one else lowest
    ends_above = config.final_sigmas_type == "sigma_min" and sampler not in ("heun", "lms", "dpm2", "dpm2_ancestral")
    return lowest if ends_above or sampler in _ENDS_ABOVE_ZERO else 0.0


def _times(config: DiffusionConfig, steps: int, *, whole: bool, leave_out: bool) -> list[float]:
    """Times by the configuration's spacing, falling (S. Lin et al., 2023, table 2)."""
    trained, count = config.num_train_timesteps, steps + leave_out
    if config.timestep_spacing == "linspace":  # numpy's sums, in which some halves are rounded down
        apart = (trained - 1) / max(count - 1, 1)
        times = [min(i * apart, trained - 1.0) for i in reversed(range(count))]
        times = [float(round(time)) for time in times] if whole else times
    elif config.timestep_spacing == "leading":
        times = [float(i * (trained // count) + config.steps_offset) for i in reversed(range(count))]
    else:
        apart = trained - (trained - trained / steps)
        times = [float(round(trained - i * apart) - 1) for i in range(steps)]
    return times[:steps]


def _distilled_times(config: DiffusionConfig, steps: int) -> list[float]:
    """Every so many of the steps on which the teacher was distilled (S. Luo et al., 2023)."""
    teacher = config.original_inference_steps
    if steps > teacher:
        raise UsageError(f"{counted(steps, 'step')}: this model was distilled on {teacher}; choose fewer")
    apart = config.num_train_timesteps // teacher
    known = [float(apart * i - 1) for i in range(teacher, 0, -1)]
    return [known[i * teacher // steps] for i in range(steps)]


def _finished(config: DiffusionConfig, sampler: str, steps: int, sigmas: list[float], times: list[float]) -> Grid:
    """The grid, with the weight of the first noise and of the result, and what PNDM and TCD look up in between."""
    levels = config.levels
    between: list[float] = []
    if sampler == "tcd":
        between = [levels.sigma(math.floor((1 - _GAMMA) * time)) for time in times[1:]] + sigmas[-1:]
    if sampler == "pndm" and not config.skip_prk_steps and steps >= 4:
        half = config.num_train_timesteps // steps // 2
        between = [levels.sigma(time + half) for time in times[1:]]
    scaled = sampler in (*_STEPWISE, *_LOGWISE, *_DISTILLED)  # diffusers runs these on x / sqrt(sigma^2 + 1)
    unscaled_start = not scaled and config.timestep_spacing != "leading"
    return Grid(
        sigmas=tuple(sigmas),
        timesteps=tuple(times),
        between=tuple(between),
        initial=sigmas[0] if unscaled_start else math.hypot(sigmas[0], 1.0),
        final=1.0 / math.hypot(sigmas[-1], 1.0) if scaled else 1.0,
    )


# Parts of a schedule.


def skipped(steps: int, strength: float) -> int:
    """Steps left out where a run starts from a picture, as diffusers counts them. Raises UsageError if all are."""
    left = min(int(steps * strength), steps)
    if left < 1:
        raise UsageError(f"strength {strength:g} of {counted(steps, 'step')} leaves none; give more of either")
    return steps - left


def part(whole: Grid, start: int, stop: int | None = None) -> Grid:
    """Steps start .. stop of a grid. Only what holds its end is scaled as the whole is."""
    steps = len(whole.sigmas) - 1
    stop = steps if stop is None else stop
    return replace(
        whole,
        sigmas=whole.sigmas[start : stop + 1],
        timesteps=whole.timesteps[start:stop],
        between=whole.between[start:stop],
        final=whole.final if stop == steps else 1.0,
    )


def split(whole: Grid, fraction: float, trained: int = 1000) -> tuple[Grid, Grid]:
    """One schedule for two models, SDXL's base and refiner: the first takes the steps whose time lies in the first
    `fraction` of the `trained` times, as diffusers' `denoising_end` and `denoising_start`. Raises UsageError."""
    border = round(trained - fraction * trained)
    count = sum(time >= border for time in whole.timesteps)
    if not 0 < count < len(whole.timesteps):
        who, steps = ("base" if count < 1 else "refiner"), len(whole.timesteps)
        raise UsageError(
            f"--refine-at {fraction:g} leaves the {who} none of {counted(steps, 'step')}: "
            f"choose another, more steps or strength"
        )
    return part(whole, 0, count), part(whole, count)
