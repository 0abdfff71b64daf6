"""Samplers that add no noise and use no earlier step.

They solve dx/dsigma = (x - denoised) / sigma, which is the same for diffusion and flow models. A step to sigma = 0 is
an Euler step in all of them: its result is `denoised`.
"""

from __future__ import annotations

import math

from qwenimg.common.sampling.steps import ancestral, renoised, to_d, toward
from qwenimg.common.sampling.types import Array, DenoiseFunction, Noise, Schedule, States


def ddim(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise, eta: float = 0.0) -> States:
    """Sample with DDIM; `eta` is the share of DDPM's noise (J. Song et al., "Denoising Diffusion Implicit Models",
    2021)."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next, eta)
        x = renoised(toward(x, denoise(x, sigma), sigma, down), scale, up, noise)
        x = yield x


def euler(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with Euler's method (T. Karras et al., "Elucidating the Design Space of Diffusion-Based Generative
    Models", 2022)."""
    for sigma, sigma_next in schedule.pairs():
        x = toward(x, denoise(x, sigma), sigma, sigma_next)
        x = yield x


def heun(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with Heun's method: the mean of the slopes before and after a step (T. Karras et al., algorithm 1,
    2022)."""
    for sigma, sigma_next in schedule.pairs():
        denoised = denoise(x, sigma)
        ahead = toward(x, denoised, sigma, sigma_next)
        if sigma_next > 0:
            ds = to_d(x, denoised, sigma) + to_d(ahead, denoise(ahead, sigma_next), sigma_next)
            ahead = x + (0.5 * (sigma_next - sigma)) * ds
        x = ahead
        x = yield x


def heunpp2(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with Heun++: the slopes of up to two later levels, weighted by those levels over the first one of the
    run (Carzit, "sd-webui-samplers-scheduler", 2023). The weights make it a first-order method."""
    first, end = schedule.sigmas[0], len(schedule.sigmas) - 1
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        denoised = denoise(x, sigma)
        ahead = toward(x, denoised, sigma, sigma_next)
        later = schedule.sigmas[i + 1 : min(i + 3, end)]
        weights = [level / ((len(later) + 1) * first) for level in later]
        total = (1.0 - sum(weights)) * to_d(x, denoised, sigma)
        for j, (level, weight) in enumerate(zip(later, weights, strict=True)):
            denoised = denoise(ahead, level)
            total = total + weight * to_d(ahead, denoised, level)
            if j + 1 < len(later):
                ahead = toward(ahead, denoised, level, later[j + 1])
        x = x + (sigma_next - sigma) * total if later else ahead
        x = yield x


def dpm2(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with the midpoint method, the middle taken by log sigma: DPM-Solver-2 as T. Karras et al. (2022) write
    it."""
    for sigma, sigma_next in schedule.pairs():
        x = midpoint(x, denoise, sigma, sigma_next)
        x = yield x


def midpoint(x: Array, denoise: DenoiseFunction, sigma: float, sigma_next: float) -> Array:
    denoised = denoise(x, sigma)
    if sigma_next == 0:
        return denoised
    middle = math.sqrt(sigma * sigma_next)
    halfway = toward(x, denoised, sigma, middle)
    return x + (sigma_next - sigma) * to_d(halfway, denoise(halfway, middle), middle)
