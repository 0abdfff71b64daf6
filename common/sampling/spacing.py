"""Schedules that spread a run's levels over all trained levels: falling, all above 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from qwenimg.common.sampling.discrete import DiscreteSchedule

LARGEST = 4096.0  # the largest level to spread by size: zero terminal SNR may be further out
_RHO = 7.0  # the exponent of Karras et al.
_BETA = 0.6

# A. Sabour et al., "Align Your Steps: Optimizing Sampling Schedules in Diffusion Models", 2024: levels of ten steps
AYS_SD = (14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029)
AYS_SDXL = (14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029)


def even_in_root(high: float, low: float, steps: int) -> list[float]:
    top, bottom = high ** (1 / _RHO), low ** (1 / _RHO)
    return [(top + share * (bottom - top)) ** _RHO for share in _shares(steps)]


def even_in_log(high: float, low: float, steps: int) -> list[float]:
    return [high ** (1 - share) * low**share for share in _shares(steps)]


def at_beta_quantiles(high: float, low: float, steps: int) -> list[float]:
    """Place levels at quantiles of the Beta distribution between `high` and `low`, both included."""
    return [low + beta_quantile(1 - share, _BETA) * (high - low) for share in _shares(steps)]


def _shares(steps: int) -> list[float]:
    """Return even shares from 0 to 1, both included."""
    return [i / max(steps - 1, 1) for i in range(steps)]


def karras(levels: DiscreteSchedule, steps: int) -> list[float]:
    """Spread levels evenly in sigma^(1/7) (T. Karras et al., 2022)."""
    return even_in_root(min(levels.sigmas[-1], LARGEST), levels.sigmas[0], steps)


def exponential(levels: DiscreteSchedule, steps: int) -> list[float]:
    """Spread levels evenly in log sigma."""
    return even_in_log(min(levels.sigmas[-1], LARGEST), levels.sigmas[0], steps)


def beta(levels: DiscreteSchedule, steps: int) -> list[float]:
    """Place times at quantiles of the Beta distribution, denser at both ends (H. Lee et al., "Beta Sampling is All
    You Need: Efficient Image Generation Strategy for Diffusion Models using Stepwise Spectral Analysis", 2024)."""
    last = len(levels.sigmas) - 1
    times = [round(last * beta_quantile(1 - i / steps, _BETA)) for i in range(steps)]
    return [levels.sigmas[time] for time in dict.fromkeys(times)]


def sgm_uniform(levels: DiscreteSchedule, steps: int) -> list[float]:
    """Spread times evenly from the last trained one to the first, which is left out (Stability AI,
    generative-models)."""
    last = len(levels.sigmas) - 1
    return [levels.sigma_log(last * (1 - i / steps)) for i in range(steps)]


def simple(levels: DiscreteSchedule, steps: int) -> list[float]:
    """Take every n-th of the trained times, from the last one down."""
    count = len(levels.sigmas)
    return [levels.sigmas[-1 - i * count // steps] for i in range(steps)]


SPREADS: Mapping[str, Callable[[DiscreteSchedule, int], list[float]]] = MappingProxyType(
    {"karras": karras, "exponential": exponential, "beta": beta, "sgm_uniform": sgm_uniform, "simple": simple}
)


def ays(table: tuple[float, ...], steps: int) -> list[float]:
    """Interpolate a published table of levels to another number of steps, linearly in log sigma."""
    logs, last = [math.log(sigma) for sigma in table], len(table) - 1
    sigmas = []
    for i in range(steps):
        low, rest = divmod(i * last, steps)
        weight = rest / steps
        sigmas.append(table[low] if rest == 0 else math.exp((1 - weight) * logs[low] + weight * logs[low + 1]))
    return sigmas


def beta_quantile(share: float, shape: float) -> float:
    """Return the x at which the distribution function of Beta(shape, shape) is `share`, by bisection."""
    if share > 0.5:
        return 1.0 - beta_quantile(1.0 - share, shape)
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _beta_reached(middle, shape) < share else (low, middle)
    return 0.5 * (low + high)


def _beta_reached(x: float, shape: float) -> float:
    """Return the regularized incomplete beta function of (shape, shape) for x up to 1/2, by its power series."""
    term, total = 1.0, 1.0 / shape
    for n in range(1, 80):
        term *= (n - shape) / n * x
        total += term / (shape + n)
    scale = math.exp(math.lgamma(2 * shape) - 2 * math.lgamma(shape))
    return float(scale * x**shape * total)
