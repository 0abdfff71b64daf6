"""diffusers' schedulers as the sampler and the schedule of a call.

`pipe.scheduler = X.from_config(pipe.scheduler.config)` takes a class of `qwenimg.diffusers` or of diffusers: only the
name of the class and its configuration are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling.discrete import DiffusionConfig, parse_diffusion
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.sampling.schedules import sampler_of

FLOW = "FlowMatchEulerDiscreteScheduler"
FLOW_HEUN = "FlowMatchHeunDiscreteScheduler"
NAMES = (
    "DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSDEScheduler",
    "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", FLOW, FLOW_HEUN, "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LCMScheduler", "LMSDiscreteScheduler",
    "PNDMScheduler", "SASolverScheduler", "TCDScheduler", "UniPCMultistepScheduler",
)  # fmt: skip
# Fields that belong to the model: a scheduler takes them over, and a change of one would be another model.
_TRAINED = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "prediction_type", "steps_offset",
    "rescale_betas_zero_snr",
)  # fmt: skip
_SHARED = (*_TRAINED, "timestep_spacing", "set_alpha_to_one", "skip_prk_steps")
_SPREADS = ("use_karras_sigmas", "use_exponential_sigmas")


@dataclass(frozen=True)
class Scheduler:
    """A scheduler's configuration; its subclasses have the names of diffusers' classes."""

    class_name: ClassVar[str] = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None = None, **changes: Any) -> Self:
        """Return the scheduler with a configuration, usually `pipe.scheduler.config`, and changes of it."""
        if not isinstance(config, Mapping | None):
            raise UsageError(f"config is {clean(config, 40)}; give pipe.scheduler.config")
        return cls({**(config or {}), **changes})


@cache
def scheduler_class(name: str) -> type[Scheduler]:
    return type(name, (Scheduler,), {"class_name": name, "__module__": "qwenimg.diffusers"})


def of_model(scheduler: object) -> Scheduler:
    """Return the model's own scheduler for its configuration, a FlowMatchConfig or a DiffusionConfig."""
    if isinstance(scheduler, DiffusionConfig):
        values = asdict(scheduler)
        shared = (*_SHARED, *(name for name in _SPREADS if values[name]))
        return scheduler_class(scheduler.class_name)({**{name: values[name] for name in shared}, "clip_sample": False})
    values = asdict(scheduler) if isinstance(scheduler, FlowMatchConfig) else {}
    name = scheduler.class_name if isinstance(scheduler, FlowMatchConfig) else FLOW
    return scheduler_class(name)({name: value for name, value in values.items() if name != "sample_sigmas"})


def options(scheduler: object, own: object) -> tuple[dict[str, Any], str]:
    """Return the options of a call for the `scheduler` of a model whose own configuration is `own`, and a warning or
    "". Raises UsageError for one that is not built here."""
    name, config = type(scheduler).__name__, getattr(scheduler, "config", None)
    if not isinstance(config, Mapping):
        raise UsageError(f"scheduler is {clean(name, 60)}; give X.from_config(pipe.scheduler.config)")
    values = {key: value for key, value in config.items() if not key.startswith("_")}
    if isinstance(own, FlowMatchConfig):
        return _flow(name, values, own), ""
    if not isinstance(own, DiffusionConfig):
        raise UsageError(f"scheduler: {clean(name, 60)} is not for this model, whose scheduler is its own")
    return _diffusion(name, values, own)


def _flow(name: str, values: Mapping[str, Any], own: FlowMatchConfig) -> dict[str, Any]:
    if name not in (FLOW, FLOW_HEUN, own.class_name):
        raise UsageError(
            f"scheduler: {clean(name, 60)} spaces a flow model's levels by another rule; give the call sampler=, as "
            "sampler='dpmpp_2m', which takes the model's own levels"
        )
    sampler = {} if name == own.class_name else {"sampler": "heun" if name == FLOW_HEUN else "euler"}
    changed = {
        one.name: values[one.name]
        for one in fields(own)
        if one.name in values and not _same(values[one.name], getattr(own, one.name))
    }
    lightning = asdict(own.lightning())
    if changed and all(key in lightning and _same(value, lightning[key]) for key, value in changed.items()):
        return sampler | {"schedule": "lightning"}
    for key, value in changed.items():
        raise UsageError(
            f"scheduler: {key}={clean(value, 40)} is not the model's ({getattr(own, key)}), which is the only one here"
        )
    return sampler


def _diffusion(name: str, values: Mapping[str, Any], own: DiffusionConfig) -> tuple[dict[str, Any], str]:
    if name not in NAMES or name in (FLOW, FLOW_HEUN):
        raise UsageError(f"scheduler: {clean(name, 60)} is not built for this model; `qwenimg samplers` lists what is")
    if values.get("clip_sample"):
        raise UsageError("scheduler: clip_sample=True is not built: latents are never clipped here")
    kept = {key: value for key, value in values.items() if value is not False or key in _SHARED}
    try:
        config = parse_diffusion({**kept, "_class_name": name}, "scheduler")
        sampler = sampler_of(config)
    except ModelError as error:
        raise UsageError(str(error)) from None
    for key in _TRAINED:
        if key in values and getattr(config, key) != getattr(own, key):
            asked = f"{key}={clean(values[key], 40)}"
            raise UsageError(f"scheduler: {asked} is not the model's ({getattr(own, key)}), which was trained so")
    chosen = {"sampler": sampler}
    if spread := next((key for key in _SPREADS if getattr(config, key) and not getattr(own, key)), None):
        schedule = spread.split("_")[1]
        return chosen | {"schedule": schedule}, (
            f"{spread}: schedule={schedule!r} here spreads the levels over all that the model was trained with, as "
            "k-diffusion does; diffusers rounds them, so a picture differs a little"
        )
    if config.timestep_spacing != own.timestep_spacing:
        if config.timestep_spacing != "trailing":
            raise UsageError(
                f"scheduler: timestep_spacing={config.timestep_spacing!r}: only 'trailing' or the model's own, "
                f"{own.timestep_spacing!r}, is taken"
            )
        chosen["schedule"] = "trailing"
    return chosen, ""


def _same(one: object, other: object) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
