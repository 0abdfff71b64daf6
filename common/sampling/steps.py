"""Building blocks of several samplers: steps as coefficients, which are Python floats computed before they touch an
array.

D is `denoised`, the model's prediction of the image. h is the growth of lambda = log(alpha / sigma) over a step. For
both kinds of model deterministic steps are exact where D is constant, and stochastic steps have the distribution that
belongs to the level at their end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from qwenimg.common.sampling.types import Array, Noise, Schedule, States

# Gauss and Legendre's eight points on -1..1: exact for polynomials up to degree 15.
_POINTS = (0.1834346424956498, 0.5255324099163290, 0.7966664774136267, 0.9602898564975363)
_WEIGHTS = (0.3626837833783620, 0.3137066458778873, 0.2223810344533745, 0.1012285362903763)


def unchanged(states: States) -> Iterator[Array]:
    """Yield the states of a sampler that goes on from each as it is."""
    with suppress(StopIteration):
        x = next(states)
        while True:
            yield x
            x = states.send(x)


def toward(x: Array, denoised: Array, sigma: float, sigma_next: float) -> Array:
    """Move x from `sigma` to `sigma_next` with `denoised` constant: exact for dx/dsigma = (x - denoised) / sigma."""
    share = sigma_next / sigma
    return share * x + (1.0 - share) * denoised


def to_d(x: Array, denoised: Array, sigma: float) -> Array:
    """Return dx/dsigma."""
    return (1.0 / sigma) * (x - denoised)


def growth(schedule: Schedule, sigma: float, sigma_next: float) -> float:
    """Return h, the growth of lambda: infinite from a level without signal and to one without noise."""
    return schedule.half_log_snr(sigma_next) - schedule.half_log_snr(sigma)


def halfway(schedule: Schedule, sigma: float, sigma_next: float) -> float:
    """Return the level in the middle, by lambda."""
    return schedule.sigma_at(0.5 * (schedule.half_log_snr(sigma) + schedule.half_log_snr(sigma_next)))


def ancestral(schedule: Schedule, sigma: float, sigma_next: float, eta: float = 1.0) -> tuple[float, float, float]:
    """Return an ancestral step: the level to go down to, the factor of x there, and the weight of fresh noise.

    The result has the distribution of `sigma_next`. For diffusion models with eta 1 this is the reverse process of DDPM
    (J. Ho et al., "Denoising Diffusion Probabilistic Models", 2020), for flow models its rectified-flow form.
    """
    if schedule.flow:
        down = sigma_next * (1.0 + (sigma_next / sigma - 1.0) * eta)
        scale = schedule.alpha(sigma_next) / schedule.alpha(down)
        return down, scale, math.sqrt(max(sigma_next * sigma_next - (scale * down) ** 2, 0.0))
    up = eta * sigma_next * math.sqrt(max(1.0 - (sigma_next / sigma) ** 2, 0.0))
    return math.sqrt(max(sigma_next * sigma_next - up * up, 0.0)), 1.0, up


def renoised(x: Array, scale: float, up: float, noise: Noise) -> Array:
    """Return x after the second half of an ancestral step: scaled, with noise added."""
    if up == 0:
        return x
    return (x if scale == 1 else scale * x) + up * noise()


def diffused(schedule: Schedule, sigma: float, sigma_next: float, tau: float = 1.0) -> tuple[float, float, float]:
    """Return a step of the reverse SDE with D constant: the weights of x, of D, and of fresh noise.

    tau is the noise of the SDE: 0 gives the ODE, 1 the process that adds as much noise as the forward one.
    """
    h = growth(schedule, sigma, sigma_next)
    keep = sigma_next / sigma * (math.exp(-tau * tau * h) if tau else 1.0)
    fresh = sigma_next * math.sqrt(-math.expm1(-2.0 * tau * tau * h)) if tau else 0.0
    return keep, schedule.alpha(sigma_next) * gain(h, tau), fresh


def gain(h: float, tau: float = 1.0) -> float:
    """Return 1 - exp(-(1 + tau^2) h)."""
    return -math.expm1(-(1.0 + tau * tau) * h)


def integral(function: Callable[[float], float], start: float, end: float) -> float:
    """Return the integral of a nearly polynomial function between two numbers."""
    middle, half = 0.5 * (start + end), 0.5 * (end - start)
    pairs = zip(_POINTS, _WEIGHTS, strict=True)
    return half * sum(w * (function(middle - half * p) + function(middle + half * p)) for p, w in pairs)


def lagrange(at: float, nodes: Sequence[float], index: int) -> float:
    """Return the value at `at` of the polynomial that is 1 at node `index` and 0 at the others."""
    chosen = nodes[index]
    return math.prod((at - node) / (chosen - node) for i, node in enumerate(nodes) if i != index)


def adams(nodes: Sequence[float], sigma_next: float) -> list[float]:
    """Return the weights of slopes at `nodes` in the step from nodes[0] to `sigma_next`: Adams and Bashforth's, for
    any spacing."""
    return [
        integral(lambda sigma, i=i: lagrange(sigma, nodes, i), nodes[0], sigma_next)  # type: ignore[misc]
        for i in range(len(nodes))
    ]


def weighted(arrays: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return the sum of arrays times numbers, added from the first to the last."""
    total = weights[0] * arrays[0]
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        total = total + weight * array
    return total
