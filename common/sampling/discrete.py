"""The noise levels of a diffusion model's training, from its `scheduler_config.json`.

- A level is sigma = sqrt((1 - a) / a), where a is the product of 1 - beta up to a timestep: the weight of noise in x =
  image + sigma noise (T. Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models", 2022). The
  published formulas, written for sqrt(a) x, are the same ones in this state.
- A missing field has the default of the file's own scheduler class. Those defaults differ.
- Zero terminal SNR makes the last sigma infinite. A finite one stands for it, far enough out for float32.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Protocol

from qwenimg.common.base.config import parse
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.sampling.types import Schedule

MAX_BETA = 0.999
# sqrt(1 - a) / sqrt(a) is 4096, which solvers that step in log sigma can bear; a single step is exact from 2**24.
_LAST_PRODUCT = 2.0**-24
_LAST_PRODUCT_STEPWISE = 2.0**-48

_FROM_ZERO = {"timestep_spacing": "leading"}
_STABLE = {"beta_start": 0.00085, "beta_end": 0.012}
_DISTILLED = {**_STABLE, **_FROM_ZERO, "beta_schedule": "scaled_linear", "set_alpha_to_one": True}
# Defaults of diffusers' classes where they differ from the fields of `DiffusionConfig`
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "PNDMScheduler": _FROM_ZERO,
    "DDIMScheduler": {**_FROM_ZERO, "set_alpha_to_one": True},
    "DDPMScheduler": _FROM_ZERO,
    "EulerDiscreteScheduler": {},
    "EulerAncestralDiscreteScheduler": {},
    "HeunDiscreteScheduler": _STABLE,
    "LMSDiscreteScheduler": {},
    "KDPM2DiscreteScheduler": _STABLE,
    "KDPM2AncestralDiscreteScheduler": _STABLE,
    "DPMSolverMultistepScheduler": {},
    "DPMSolverSinglestepScheduler": {},
    "DPMSolverSDEScheduler": _STABLE,
    "UniPCMultistepScheduler": {"solver_type": "bh2"},
    "DEISMultistepScheduler": {"solver_type": "logrho", "algorithm_type": "deis", "final_sigmas_type": "sigma_min"},
    "SASolverScheduler": {"algorithm_type": "data_prediction", "final_sigmas_type": "sigma_min"},
    "LCMScheduler": _DISTILLED,
    "TCDScheduler": _DISTILLED,
}
_STEPWISE = ("DDIMScheduler", "DDPMScheduler", "LCMScheduler", "TCDScheduler")
# Fields without effect here: latents are never clipped, and a solver lowers its order by its own rule
_IGNORED = frozenset(
    (
        "clip_sample", "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value", "lower_order_final",
        "time_shift_type", "flow_shift", "timestep_scaling", "noise_sampler_seed", "euler_at_final",
    )
)  # fmt: skip

_ABSENT: tuple[object, ...] = (None, [], -math.inf)  # no corrector left out, no level clipped


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The fields of a diffusion model's `scheduler_config.json`, by their own names."""

    class_name: str = "EulerDiscreteScheduler"
    num_train_timesteps: int = field(default=1000, metadata={"min": 2, "max": 10_000})
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    timestep_spacing: str = "linspace"
    steps_offset: int = field(default=0, metadata={"min": 0, "max": 1000})
    set_alpha_to_one: bool = False
    skip_prk_steps: bool = False
    rescale_betas_zero_snr: bool = False
    use_karras_sigmas: bool = False
    use_exponential_sigmas: bool = False
    final_sigmas_type: str = "zero"
    interpolation_type: str = "linear"
    timestep_type: str = "discrete"
    algorithm_type: str = "dpmsolver++"
    solver_type: str = "midpoint"
    solver_order: int = 2
    predictor_order: int = 2
    corrector_order: int = 2
    predict_x0: bool = True
    variance_type: str = "fixed_small"
    original_inference_steps: int = 50

    def __post_init__(self) -> None:
        self._check("class_name", tuple(_DEFAULTS))
        self._check("beta_schedule", ("linear", "scaled_linear", "squaredcos_cap_v2"))
        self._check("prediction_type", ("epsilon", "v_prediction", "sample"))
        self._check("timestep_spacing", ("leading", "linspace", "trailing"))
        self._check("final_sigmas_type", ("zero", "sigma_min"))
        self._check("interpolation_type", ("linear",))
        self._check("timestep_type", ("discrete",))
        self._check("variance_type", ("fixed_small",))
        if not 0 < self.beta_start <= self.beta_end < 1:
            problem = f"beta_start is {self.beta_start}, beta_end {self.beta_end}"
            raise ModelError(f"scheduler: {problem}; expected 0 < beta_start <= beta_end < 1")
        if self.original_inference_steps > self.num_train_timesteps:
            problem = f"original_inference_steps is {self.original_inference_steps}"
            raise ModelError(
                f"scheduler: {problem}, more than num_train_timesteps, which is {self.num_train_timesteps}"
            )
        if self.use_karras_sigmas and self.use_exponential_sigmas:
            raise ModelError("scheduler: use_karras_sigmas and use_exponential_sigmas are both true")

    def _check(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in known:
            expected = ", ".join(known)
            raise ModelError(f"scheduler: {name} is {clean(value, 40)!r}, expected one of {expected}")

    @property
    def levels(self) -> DiscreteSchedule:
        return _discrete_schedule(self)

    def betas(self) -> list[float]:
        """Return the share of noise that each trained timestep adds."""
        n = self.num_train_timesteps
        if self.beta_schedule == "squaredcos_cap_v2":  # A. Nichol, P. Dhariwal, "Improved DDPM", 2021
            bar = [math.cos((i / n + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(n + 1)]
            return [min(1.0 - after / before, MAX_BETA) for before, after in pairwise(bar)]
        power = 2.0 if self.beta_schedule == "scaled_linear" else 1.0
        low, high = self.beta_start ** (1 / power), self.beta_end ** (1 / power)
        return [(low + (high - low) * i / max(n - 1, 1)) ** power for i in range(n)]


@cache
def _discrete_schedule(config: DiffusionConfig) -> DiscreteSchedule:
    products = list(accumulate((1.0 - beta for beta in config.betas()), mul))
    if config.rescale_betas_zero_snr:
        products = _without_terminal_signal(products)
        last = _LAST_PRODUCT_STEPWISE if config.class_name in _STEPWISE else _LAST_PRODUCT
        products[-1] = min(last, products[-2] / 2)  # beyond the level before it
    return DiscreteSchedule(sigmas=tuple(math.sqrt((1.0 - a) / a) for a in products))


def parse_diffusion(data: Mapping[str, object], source: Path | str) -> DiffusionConfig:
    """Return the noise levels in `data`, the contents of `scheduler_config.json`. Raises ModelError."""
    name = data.get("_class_name", DiffusionConfig.class_name)
    present = {key: value for key, value in data.items() if value not in _ABSENT}
    filled = {**_DEFAULTS.get(str(name), {}), **present, "class_name": name}
    return parse(DiffusionConfig, filled, source=source, ignored=_IGNORED)


def _without_terminal_signal(products: list[float]) -> list[float]:
    """Shift and scale the products so that no signal is left at the end (S. Lin et al., "Common Diffusion Noise
    Schedules and Sample Steps are Flawed", 2023)."""
    roots = [math.sqrt(a) for a in products]
    scale = roots[0] / (roots[0] - roots[-1])
    return [((root - roots[-1]) * scale) ** 2 for root in roots]


@dataclass(frozen=True, kw_only=True)
class DiscreteSchedule:
    """The sigma of each trained timestep 0, 1, ...: rising."""

    sigmas: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 < low < high < math.inf for low, high in pairwise(self.sigmas)):
            raise ModelError("scheduler: the noise levels of its betas do not rise from step to step")

    def sigma(self, timestep: float) -> float:
        """Return the level at a time in 0 .. T - 1: linear in between, as diffusers interpolates."""
        low = min(max(int(timestep), 0), len(self.sigmas) - 2)
        weight = timestep - low
        if weight in (0, 1):
            return self.sigmas[low + int(weight)]
        return (1 - weight) * self.sigmas[low] + weight * self.sigmas[low + 1]

    def sigma_log(self, timestep: float) -> float:
        """Return the level at a time in 0 .. T - 1: linear in log sigma in between, the inverse of `timestep`."""
        low = min(max(int(timestep), 0), len(self.sigmas) - 2)
        weight = timestep - low
        if weight in (0, 1):
            return self.sigmas[low + int(weight)]
        below, above = self.sigmas[low], self.sigmas[low + 1]
        return below * math.exp(weight * math.log(above / below))

    def timestep(self, sigma: float) -> float:
        """Return the time of a level: linear in log sigma in between, exact on the trained levels, never outside
        them."""
        if sigma <= self.sigmas[0]:
            return 0.0
        if sigma >= self.sigmas[-1]:
            return float(len(self.sigmas) - 1)
        high = bisect_left(self.sigmas, sigma)
        if self.sigmas[high] == sigma:
            return float(high)
        below, above = self.sigmas[high - 1], self.sigmas[high]
        return high - 1 + math.log(sigma / below) / math.log(above / below)


class Timed(Protocol):
    """Noise levels that have a time each."""

    def timestep(self, sigma: float) -> float: ...


def clock(levels: Timed, schedule: Schedule) -> Callable[[float], float]:
    """Return a function from a noise level to the model's time: from the schedule at its own levels, from the
    training between them."""
    named = dict(zip(schedule.sigmas, schedule.timesteps, strict=False))
    return lambda sigma: named[sigma] if sigma in named else levels.timestep(sigma)


def scalings(prediction: str, sigma: float) -> tuple[float, float, float]:
    """Return c_in, c_skip and c_out, with which denoised = c_skip x + c_out model(c_in x, t).

    `prediction` names the model's output: "epsilon" the noise, "v_prediction" the velocity (T. Salimans, J. Ho,
    "Progressive Distillation for Fast Sampling of Diffusion Models", 2022), "sample" the image.
    """
    c_in = 1.0 / math.sqrt(sigma * sigma + 1.0)
    if prediction == "epsilon":
        return c_in, 1.0, -sigma
    if prediction == "v_prediction":
        return c_in, c_in * c_in, -sigma * c_in
    assert prediction == "sample"
    return c_in, 0.0, 1.0
