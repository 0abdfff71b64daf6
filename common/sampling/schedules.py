"""Schedules of noise levels for diffusion models: which of its trained levels a run passes.

- "model" follows diffusers' scheduler for that sampler, with the model's configuration: the sampler's `ScheduleRule`.
- The others spread the levels by their own rule over all trained levels, and end with 0.
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
from qwenimg.common.sampling.table import ScheduleRule
from qwenimg.common.sampling.types import MAX_STEPS, Schedule

MODEL = "model"
TRAILING = "trailing"
LIGHTNING = "lightning"  # for flow models: see `flow_match.LIGHTNING_SHIFT`
SINGLE: Mapping[str, float] = MappingProxyType({"hyper": 800.0, "dmd": 400.0})
"""Schedules of one step, each with its time: of Hyper-SDXL's UNet (Y. Ren et al., "Hyper-SD", 2024), and of PixArt-DMD
(J. Chen et al., "PixArt-Sigma", 2024)."""
SCHEDULES = (MODEL, *SPREADS, "ays", TRAILING, LIGHTNING, *SINGLE)
_GAMMA = 0.3  # TCD's

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
    """Return the name of the sampler that the model's configuration asks for. Raises ModelError if it is not built."""
    sampler = _SAMPLER_OF.get(config.class_name)
    if config.class_name == "DPMSolverMultistepScheduler":
        sampler = _DPM_SOLVER.get((config.algorithm_type, config.solver_type, config.solver_order))
    orders = (config.predictor_order, config.corrector_order) if sampler == "sa_solver" else (config.solver_order,)
    if sampler in ("unipc", "deis", "sa_solver") and set(orders) != {2}:
        sampler = None
    if sampler == "unipc" and (config.solver_type != "bh2" or not config.predict_x0):
        sampler = None
    if sampler is None:
        asked_for = f"{config.class_name} with algorithm_type {clean(config.algorithm_type, 30)!r}"
        asked_for += f", solver_type {clean(config.solver_type, 30)!r}, solver_order {config.solver_order}"
        raise ModelError(f"scheduler: {asked_for} is not built; choose another with --sampler")
    return sampler


def check_name(schedule: str) -> None:
    """Raise UsageError unless a schedule has that name."""
    if schedule not in SCHEDULES:
        raise UsageError(f"no schedule {clean(schedule, 40)!r}; choose one of {', '.join(SCHEDULES)}")


def build(config: DiffusionConfig, rule: ScheduleRule, schedule: str, steps: int, *, sdxl: bool = False) -> Schedule:
    """Return the levels of a run of `steps` steps by a sampler of this `rule`; `sdxl` chooses the table of "ays".
    Raises UsageError."""
    most = min(MAX_STEPS, config.num_train_timesteps)
    if not 1 <= steps <= most:
        raise UsageError(f"steps is {steps}; choose 1 to {most}")
    levels = config.levels
    if schedule in ("", MODEL):
        return _finished(config, rule, steps, *_model_schedule(config, rule, steps))
    check_name(schedule)
    if schedule == LIGHTNING:
        raise UsageError("--schedule lightning is for flow models, such as Qwen-Image; SDXL-Lightning's is trailing")
    if schedule == TRAILING:
        trailing = replace(config, timestep_spacing=TRAILING)
        return _finished(trailing, rule, steps, *_model_schedule(trailing, rule, steps))
    if (time := SINGLE.get(schedule)) is not None:
        if steps != 1 or config.num_train_timesteps <= time:
            given_steps = f"{counted(steps, 'step')} of {config.num_train_timesteps} trained times"
            raise UsageError(
                f"--schedule {schedule} is one step from time {time:g}, found {given_steps}; give --steps 1"
            )
        ends = [levels.sigma(time), _last_level(config, rule, steps, time)]
        return _finished(config, rule, steps, ends, [time])
    if schedule == "ays":
        sigmas = ays(AYS_SDXL if sdxl else AYS_SD, steps)
    else:
        sigmas = SPREADS[schedule](levels, steps)
    last = len(levels.sigmas) - 1.0
    times = [last if sigma >= LARGEST else levels.timestep(sigma) for sigma in sigmas]
    return _finished(config, rule, steps, [*sigmas, 0.0], times)


def _model_schedule(config: DiffusionConfig, rule: ScheduleRule, steps: int) -> tuple[list[float], list[float]]:
    """Return levels and times of the model's own schedule: one level more than times."""
    levels = config.levels
    if rule.times == "distilled":
        times = _distilled_times(config, steps)
        return [*map(levels.sigma, times), _last_level(config, rule, steps, times[-1])], times
    in_lambda = rule.times == "lambda"
    times = _times(config, steps, whole=rule.times != "sigma", leave_out=in_lambda)
    if times[0] > len(levels.sigmas) - 1 or len(set(times)) < steps:
        raise UsageError(f"{counted(steps, 'step')}: too many for this schedule; choose fewer, or --schedule simple")
    sigmas = [levels.sigma(time) for time in times]
    if config.rescale_betas_zero_snr and not rule.exact_from_afar:
        farthest = max(LARGEST, math.sqrt(2) * levels.sigmas[-2])
        sigmas = [min(sigma, farthest) for sigma in sigmas]
    if config.use_karras_sigmas or config.use_exponential_sigmas:
        spread = even_in_root if config.use_karras_sigmas else even_in_log
        ends = (levels.sigmas[-1], levels.sigmas[0]) if in_lambda else (sigmas[0], sigmas[-1])
        sigmas = spread(*ends, steps)
        times = [levels.timestep(sigma) for sigma in sigmas]
        if config.use_karras_sigmas and rule.rounds_karras:
            times = [float(round(time)) for time in times]
    return [*sigmas, _last_level(config, rule, steps, times[-1])], times


def _last_level(config: DiffusionConfig, rule: ScheduleRule, steps: int, time: float) -> float:
    lowest = config.levels.sigmas[0]
    if rule.last == "before":
        before = time - config.num_train_timesteps // steps
        if config.timestep_spacing == "leading" and before >= 0:
            return config.levels.sigma(before)
        return 0.0 if config.set_alpha_to_one else lowest
    above_zero = rule.last == "lowest" or (rule.last == "configured" and config.final_sigmas_type == "sigma_min")
    return lowest if above_zero else 0.0


def _times(config: DiffusionConfig, steps: int, *, whole: bool, leave_out: bool) -> list[float]:
    """Return falling times by the configuration's spacing (S. Lin et al., 2023, table 2)."""
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
    """Return times spread evenly over the steps on which the teacher was distilled (S. Luo et al., 2023)."""
    teacher = config.original_inference_steps
    if steps > teacher:
        raise UsageError(f"{counted(steps, 'step')}: this model was distilled on {teacher}; choose fewer")
    apart = config.num_train_timesteps // teacher
    known = [float(apart * i - 1) for i in range(teacher, 0, -1)]
    return [known[i * teacher // steps] for i in range(steps)]


def _finished(
    config: DiffusionConfig, rule: ScheduleRule, steps: int, sigmas: list[float], times: list[float]
) -> Schedule:
    """Return the schedule, with the weights of the first noise and of the result, and the levels in between that
    PNDM and TCD look up."""
    levels = config.levels
    between: list[float] = []
    if rule.between == "jump":
        between = [levels.sigma(math.floor((1 - _GAMMA) * time)) for time in times[1:]] + sigmas[-1:]
    if rule.between == "half" and not config.skip_prk_steps and steps >= 4:
        half = config.num_train_timesteps // steps // 2
        between = [levels.sigma(time + half) for time in times[1:]]
    unscaled_start = not rule.scaled and config.timestep_spacing != "leading"
    return Schedule(
        sigmas=tuple(sigmas),
        timesteps=tuple(times),
        between=tuple(between),
        initial=sigmas[0] if unscaled_start else math.hypot(sigmas[0], 1.0),
        final=1.0 / math.hypot(sigmas[-1], 1.0) if rule.scaled else 1.0,
    )


# Parts of a schedule.


def skipped(steps: int, strength: float) -> int:
    """Return the number of steps left out in a run that starts from an image, as diffusers counts them. Raises
    UsageError if all are."""
    remaining = min(int(steps * strength), steps)
    if remaining < 1:
        raise UsageError(f"strength {strength:g} of {counted(steps, 'step')} leaves none; give more of either")
    return steps - remaining


def part(whole: Schedule, start: int, stop: int | None = None) -> Schedule:
    """Return steps start .. stop of a schedule. Only the part with the end of the whole is scaled like it."""
    steps = len(whole.sigmas) - 1
    stop = steps if stop is None else stop
    return replace(
        whole,
        sigmas=whole.sigmas[start : stop + 1],
        timesteps=whole.timesteps[start:stop],
        between=whole.between[start:stop],
        final=whole.final if stop == steps else 1.0,
    )


def split(whole: Schedule, fraction: float, trained: int = 1000) -> tuple[Schedule, Schedule]:
    """Split a schedule for two models, SDXL's base and refiner. The first takes the steps whose time lies in the
    first `fraction` of the `trained` times, as diffusers' `denoising_end` and `denoising_start`. Raises UsageError."""
    border = round(trained - fraction * trained)
    count = sum(time >= border for time in whole.timesteps)
    if not 0 < count < len(whole.timesteps):
        who, steps = ("base" if count < 1 else "refiner"), len(whole.timesteps)
        raise UsageError(
            f"--refine-at {fraction:g} leaves the {who} none of {counted(steps, 'step')}: "
            f"choose another, more steps or strength"
        )
    return part(whole, 0, count), part(whole, count)
