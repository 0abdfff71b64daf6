"""DPM-Solver's own samplers, which choose their steps between the first and the last level of the schedule.

The state is x = image + sigma noise (alpha = 1), so lambda = -log sigma. For a schedule that ends with 0 there is one
more evaluation at the level before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.sampling.types import Array, DenoiseFunction, Noise, Schedule, States

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ToHost: TypeAlias = "Callable[[Array], NDArray[np.float64]]"

MAX_TRIED = 1000
_RTOL, _ATOL = 0.05, 0.0078  # tolerances of Lu et al.; the second is 2 / 256
_FIRST_STEP = 0.05
_SAFETY = 0.81
_NO_STEP = 1e-5  # in lambda
_ORDER = 3
_P, _I, _D = 0.0, 1.0, 0.0  # Crowson's controller has the integral part alone


def dpm_fast(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver-fast: as many evaluations as the schedule has steps, in third-order steps that are
    equal in lambda, and one or two last steps of lower order (C. Lu et al., "DPM-Solver: A Fast ODE Solver for
    Diffusion Probabilistic Model Sampling in Around 10 Steps", 2022)."""
    start, end, evaluations = _range(schedule)
    orders = _orders(evaluations)
    h = (end - start) / max(len(orders), 1)
    for i, order in enumerate(orders):
        here = start + i * h
        first = _noise(x, denoise, here)
        if order == 1:
            x = _step_1(x, here, h, first)
        elif order == 2:
            x = _step_2(x, here, h, first, _noise_at(x, denoise, here, h, first, 1 / 2), 1 / 2)
        else:
            x = _step_3(x, denoise, here, h, first, _noise_at(x, denoise, here, h, first, 1 / 3))
        x = yield x
    if schedule.sigmas[-1] == 0:
        yield denoise(x, schedule.sigmas[-2])


def dpm_adaptive(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise, to_host: ToHost) -> States:
    """Sample with DPM-Solver-12/23's pair of orders 2 and 3 and a controller of the step size (C. Lu et al., 2022; K.
    Crowson, 2022). A step is taken if the two results agree within 5 %.

    `to_host` copies an array to the host as float64 numbers. Only the first and the last level of the schedule matter.
    Raises NumericsError if the results never agree.
    """
    start, end, _ = _range(schedule)
    control = _Controller(step=_FIRST_STEP)
    previous = to_host(x)
    here = start
    if end - here < _NO_STEP:
        x = yield x
    while here < end - _NO_STEP:
        if control.tried >= MAX_TRIED:
            raise NumericsError(f"dpm_adaptive: no end after {control.tried} steps; use another sampler")
        h = min(control.step, end - here)
        first = _noise(x, denoise, here)
        second = _noise_at(x, denoise, here, h, first, 1 / 3)
        low = to_host(_step_2(x, here, h, first, second, 1 / 3))
        high = _step_3(x, denoise, here, h, first, second)
        if control.accepts(_error(low, to_host(high), previous)):
            x, previous, here = high, low, here + h
            x = yield x
    if schedule.sigmas[-1] == 0:
        yield denoise(x, schedule.sigmas[-2])


def _error(low: NDArray[np.float64], high: NDArray[np.float64], previous: NDArray[np.float64]) -> float:
    """Return the root mean square difference of the two results, scaled so that 1 is just allowed."""
    import numpy as np  # here: what only names samplers, such as a server's front, saves its 12 MB

    allowed = np.maximum(_ATOL, _RTOL * np.maximum(np.abs(low), np.abs(previous)))
    error = float(np.sqrt(np.mean(((low - high) / allowed) ** 2)))
    if not math.isfinite(error):
        raise NumericsError("dpm_adaptive: a value is not finite")
    return error


@dataclass
class _Controller:
    """A PID controller of the step size on the logarithm of the error (G. Soderlind, "Digital Filters in Adaptive
    Time-Stepping", 2003)."""

    step: float
    tried: int = 0
    errors: tuple[float, float] | None = None
    """The inverted errors of the last two steps that were taken, the newest first."""

    def accepts(self, error: float) -> bool:
        """Return whether the step was good, and set the size of the next one."""
        now = 1.0 / (1e-8 + error)
        last, older = self.errors or (now, now)
        proportional = (_P + _I + _D, -(_P + 2.0 * _D), _D)
        factor = math.prod(e ** (c / _ORDER) for e, c in zip((now, last, older), proportional, strict=True))
        factor = 1.0 + math.atan(factor - 1.0)  # from 0.2 to 2.6: no leaps
        self.tried += 1
        self.step *= factor
        good = factor >= _SAFETY
        if good:
            self.errors = (now, last)
        return good


def _range(schedule: Schedule) -> tuple[float, float, int]:
    """Return lambda at the start and at the last level with noise, and the number of evaluations in between."""
    ends = schedule.sigmas[-1] == 0
    last = schedule.sigmas[-2 if ends else -1]
    return -math.log(schedule.sigmas[0]), -math.log(last), len(schedule.sigmas) - (2 if ends else 1)


def _orders(evaluations: int) -> list[int]:
    whole, rest = divmod(evaluations, 3)
    if rest:
        return [3] * whole + [rest]
    return [3] * (whole - 1) + [2, 1] if whole else []


def _noise(x: Array, denoise: DenoiseFunction, here: float) -> Array:
    sigma = math.exp(-here)
    return (1.0 / sigma) * (x - denoise(x, sigma))


def _noise_at(x: Array, denoise: DenoiseFunction, here: float, h: float, first: Array, node: float) -> Array:
    """Return the noise that the model predicts at the share `node` of the step."""
    return _noise(_step_1(x, here, node * h, first), denoise, here + node * h)


def _step_1(x: Array, here: float, h: float, first: Array) -> Array:
    return x - (math.exp(-(here + h)) * math.expm1(h)) * first


def _step_2(x: Array, here: float, h: float, first: Array, second: Array, node: float) -> Array:
    weight = math.exp(-(here + h)) * math.expm1(h) / (2.0 * node)
    return _step_1(x, here, h, first) - weight * (second - first)


def _step_3(x: Array, denoise: DenoiseFunction, here: float, h: float, first: Array, second: Array) -> Array:
    """Return x after a third-order step, from the noise at its start and at a third of it."""
    late = _linear_step(x, here, 2 / 3 * h, first, second, 1 / 2)
    return _linear_step(x, here, h, first, _noise(late, denoise, here + 2 / 3 * h), 2 / 3)


def _linear_step(x: Array, here: float, h: float, first: Array, second: Array, node: float) -> Array:
    """Return x after a step whose noise prediction is linear in lambda, with value `first` at the start and `second` at
    the fraction `node` of the step."""
    weight = math.exp(-(here + h)) * (math.expm1(h) / h - 1.0) / node
    return _step_1(x, here, h, first) - weight * (second - first)
