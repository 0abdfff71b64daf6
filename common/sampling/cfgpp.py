"""CFG++: guidance that moves towards the guided prediction with the noise of the unconditional branch.

With D the guided `denoised`, U the unconditional one and eps = (x - alpha U) / sigma, a step gives alpha' D + sigma'
eps (H. Chung et al., "CFG++: Manifold-constrained Classifier Free Guidance for Diffusion Models", 2024). The guidance
scale is CFG++'s lambda, 1 or less.
"""

from __future__ import annotations

import math

from qwenimg.common.sampling.steps import ancestral, gain, growth, halfway, renoised
from qwenimg.common.sampling.types import Array, DenoiseFunction, Noise, Schedule, States


def _step(x: Array, guided: Array, unguided: Array, schedule: Schedule, sigma: float, sigma_next: float) -> Array:
    share = sigma_next / sigma
    return share * x + (schedule.alpha(sigma_next) * guided - (share * schedule.alpha(sigma)) * unguided)


def euler_cfgpp(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DDIM and CFG++ (H. Chung et al., algorithm 2, 2024)."""
    for sigma, sigma_next in schedule.pairs():
        guided, unguided = denoise.both(x, sigma)
        x = _step(x, guided, unguided, schedule, sigma, sigma_next)
        x = yield x


def euler_ancestral_cfgpp(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with ancestral steps and CFG++: down as in `euler_cfgpp`, then noise up to the next level."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next)
        guided, unguided = denoise.both(x, sigma)
        x = renoised(_step(x, guided, unguided, schedule, sigma, down), scale, up, noise)
        x = yield x


def dpmpp_2s_ancestral_cfgpp(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver++(2S) ancestral and CFG++: both halves of a step carry the noise predicted at its
    start."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next)
        guided, unguided = denoise.both(x, sigma)
        moved = _step(x, guided, unguided, schedule, sigma, down)
        if down > 0 and math.isfinite(growth(schedule, sigma, down)):
            middle = halfway(schedule, sigma, down)
            later = denoise(_step(x, guided, unguided, schedule, sigma, middle), middle)
            # Where both predictions agree this is DPM-Solver++(2S): the later one replaces the one that the step took.
            size = schedule.alpha(down) * gain(growth(schedule, sigma, down), 0.0)
            moved = moved + size * (later - guided)
        x = renoised(moved, scale, up, noise)
        x = yield x


def dpmpp_2m_cfgpp(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver++(2M) and CFG++ (H. Chung et al., 2024)."""
    previous, last = None, 0.0
    for sigma, sigma_next in schedule.pairs():
        guided, unguided = denoise.both(x, sigma)
        h = growth(schedule, sigma, sigma_next)
        x = _step(x, guided, unguided, schedule, sigma, sigma_next)
        if previous is not None and sigma_next > 0:
            x = x + (schedule.alpha(sigma_next) * gain(h, 0.0) * h / (2.0 * last)) * (guided - previous)
        previous, last = unguided, h
        x = yield x
