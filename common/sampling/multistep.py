"""Samplers that reuse the model's predictions of earlier steps: one evaluation a step, whatever their order.

The samplers that work with dx/dsigma are the same for diffusion and flow models. The exponential ones work in lambda =
log(alpha / sigma). An earlier level without signal has lambda = minus infinity, and its prediction has the weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qwenimg.common.sampling.steps import adams, gain, growth, to_d, toward, weighted
from qwenimg.common.sampling.types import Array, DenoiseFunction, Noise, Schedule, States

# Adams and Bashforth's weights for equal steps, the newest slope first.
_EQUAL = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
_FEW = 15  # a run of fewer steps ends with one of first order, as DPM-Solver's authors advise


def pndm(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with pseudo numerical methods (L. Liu et al., "Pseudo Numerical Methods for Diffusion Models on
    Manifolds", 2022): Adams and Bashforth's four-step rule on the noise.

    It starts with Runge and Kutta's method where the schedule has levels in between, else with Heun's (K. Crowson's
    PLMS).
    """
    ds: list[Array] = []
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised = denoise(x, sigma)
        ds = [to_d(x, denoised, sigma), *ds[:3]]
        if schedule.between and i < 3 and sigma_next > 0:
            total = _runge_kutta(x, ds[0], denoise, sigma, schedule.between[i], sigma_next)
        elif i == 0 and sigma_next > 0:
            ahead = toward(x, denoised, sigma, sigma_next)
            total = 0.5 * (ds[0] + to_d(ahead, denoise(ahead, sigma_next), sigma_next))
        else:
            total = weighted(ds, _EQUAL[len(ds) - 1])
        x = x + (sigma_next - sigma) * total
        x = yield x


def _runge_kutta(
    x: Array, first: Array, denoise: DenoiseFunction, sigma: float, middle: float, sigma_next: float
) -> Array:
    def ahead(known: Array, level: float) -> Array:
        reached = x + (level - sigma) * known
        return to_d(reached, denoise(reached, level), level)

    second = ahead(first, middle)
    third = ahead(second, middle)
    return weighted([first, second, third, ahead(third, sigma_next)], [1 / 6, 1 / 3, 1 / 3, 1 / 6])


def lms(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with the linear multistep method of order 4: Adams and Bashforth's rule for the schedule's own spacing
    (K. Crowson, "k-diffusion", 2022, after T. Karras et al.)."""
    return _adams(x, schedule, denoise, to_denoised=False)


def ipndm_v(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with iPNDM for unequal steps (Q. Zhang, Y. Chen, "Fast Sampling of Diffusion Models with Exponential
    Integrator", 2023): the weights of `lms`, but a step to sigma = 0 gives `denoised`."""
    return _adams(x, schedule, denoise, to_denoised=True)


def _adams(x: Array, schedule: Schedule, denoise: DenoiseFunction, *, to_denoised: bool) -> States:
    ds: list[Array] = []
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised = denoise(x, sigma)
        ds = [to_d(x, denoised, sigma), *ds[:3]]
        if to_denoised and sigma_next == 0:
            x = denoised
        else:
            nodes = schedule.sigmas[i::-1][:4]
            x = x + weighted(ds, adams(nodes, sigma_next))
        x = yield x


def ipndm(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with improved PNDM (Q. Zhang, Y. Chen, 2023): Adams and Bashforth's weights for equal steps, of lower
    order in the first steps. A step to sigma = 0 gives `denoised`."""
    ds: list[Array] = []
    for sigma, sigma_next in schedule.pairs():
        denoised = denoise(x, sigma)
        ds = [to_d(x, denoised, sigma), *ds[:3]]
        x = denoised if sigma_next == 0 else x + (sigma_next - sigma) * weighted(ds, _EQUAL[len(ds) - 1])
        x = yield x


def deis(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DEIS tAB2 in log rho, rho = sigma / alpha (Q. Zhang, Y. Chen, 2023): the noise on a line,
    integrated exactly."""
    previous, last = None, 0.0
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        eps = (1.0 / sigma) * (x - schedule.alpha(sigma) * denoised)
        x = toward(x, denoised, sigma, sigma_next)
        if previous is not None and math.isfinite(last) and sigma_next > 0 and not _last_of_few(schedule, i):
            rho = sigma / schedule.alpha(sigma)
            weight = schedule.alpha(sigma_next) * rho * (math.expm1(-h) + h * math.exp(-h)) / last
            x = x + weight * (eps - previous)
        previous, last = eps, h
        x = yield x


def dpmpp_2m(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver++(2M) (C. Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion
    Probabilistic Models", 2022)."""
    previous, last = None, 0.0
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        denoised_d = denoised
        if previous is not None and sigma_next > 0 and not _last_of_few(schedule, i):
            weight = h / (2.0 * last)
            denoised_d = (1.0 + weight) * denoised - weight * previous
        x = toward(x, denoised_d, sigma, sigma_next)
        previous, last = denoised, h
        x = yield x


def _last_of_few(schedule: Schedule, step: int) -> bool:
    steps = len(schedule.sigmas) - 1
    return step == steps - 1 and steps < _FEW


def res_multistep(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with RES, the multistep form of second order: `denoised` on a line in lambda, integrated exactly (Q.
    Zhang et al., "Improved Order Analysis and Design of Exponential Integrator for Diffusion Models Sampling",
    2023)."""
    previous, last = None, 0.0
    for sigma, sigma_next in schedule.pairs():
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        x = toward(x, denoised, sigma, sigma_next)
        if previous is not None and sigma_next > 0:
            x = x + (schedule.alpha(sigma_next) * (h - gain(h, 0.0)) / last) * (denoised - previous)
        previous, last = denoised, h
        x = yield x


def unipc(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with UniPC-2 with B(h) = exp(h) - 1: each step is predicted, then corrected by the model's prediction
    at its end, which costs no further evaluation (W. Zhao et al., "UniPC: A Unified Predictor-Corrector Framework
    for Fast Sampling of Diffusion Models", 2023). From a level without signal these are the formula's limits."""
    before, sigma_before = x, 0.0  # where the last step began
    old_denoised: list[Array] = []  # at the start of the last step and of the one before it
    steps: list[float] = []  # growth of lambda over those steps
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        if old_denoised:
            x = _corrected(before, schedule, sigma_before, sigma, [denoised, *old_denoised], steps)
        old_denoised, before, sigma_before = [denoised, *old_denoised[:1]], x, sigma
        denoised_d = denoised
        if len(old_denoised) == 2 and i < len(schedule.sigmas) - 2:  # the last step is one of first order
            weight = h / (2.0 * steps[0])
            denoised_d = (1.0 + weight) * denoised - weight * old_denoised[1]
        x = toward(x, denoised_d, sigma, sigma_next)
        steps = [h, *steps[:1]]
        x = yield x


def _corrected(
    x: Array, schedule: Schedule, sigma: float, sigma_next: float, old_denoised: Sequence[Array], steps: Sequence[float]
) -> Array:
    """Return x after the step from `sigma` to `sigma_next`, taken again with `denoised` of its end. `old_denoised`:
    the newest first."""
    h, now, start = steps[0], old_denoised[0], old_denoised[1]
    size = schedule.alpha(sigma_next) * gain(h, 0.0)
    moved = toward(x, start, sigma, sigma_next)
    if len(steps) == 1:
        return moved + (0.5 * size) * (now - start)
    ratio, g = -steps[1] / h, gain(h, 0.0)
    moment, second = 1.0 / g - 1.0 / h, (1.0 - 2.0 * (1.0 - g / h) / h) / g
    if math.isinf(ratio):  # the step before began without signal, so that its prediction weighs nothing
        return moved + (size * moment) * (now - start)
    older = (moment - second) / (1.0 - ratio)
    return moved + size * ((older / ratio) * (old_denoised[2] - start) + (moment - older) * (now - start))
