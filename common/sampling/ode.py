"""Samplers without noise of their own that look at one step at a time.

They solve dx/dsigma = (x - image) / sigma, which is the same for diffusion and flow models. A step to sigma = 0 is one
of Euler's in all of them: there the model's image is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from qwenimg.common.sampling.steps import ancestral, renoised, slope, toward
from qwenimg.common.sampling.types import Array, Denoiser, Grid, Noise


def ddim(x: Array, grid: Grid, denoise: Denoiser, noise: Noise, eta: float = 0.0) -> Iterator[Array]:
    """DDIM; `eta` is the share of DDPM's noise (J. Song et al., "Denoising Diffusion Implicit Models", 2021)."""
    for sigma, after in grid.pairs():
        down, scale, up = ancestral(grid, sigma, after, eta)
        x = renoised(toward(x, denoise(x, sigma), sigma, down), scale, up, noise)
        yield x


def euler(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Euler's method (T. Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models", 2022)."""
    for sigma, after in grid.pairs():
        x = toward(x, denoise(x, sigma), sigma, after)
        yield x


def heun(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Heun's method: the mean of the slopes before and after (T. Karras et al., algorithm 1, 2022)."""
    for sigma, after in grid.pairs():
        image = denoise(x, sigma)
        ahead = toward(x, image, sigma, after)
        if after > 0:
            slopes = slope(x, image, sigma) + slope(ahead, denoise(ahead, after), after)
            ahead = x + (0.5 * (after - sigma)) * slopes
        x = ahead
        yield x


def heunpp2(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Heun++: the slopes of up to two later levels, weighted by those levels over the first one of the run
    (Carzit, "sd-webui-samplers-scheduler", 2023). The weights make it a first-order method."""
    first, end = grid.sigmas[0], len(grid.sigmas) - 1
    for i, (sigma, after) in enumerate(grid.pairs()):
        image = denoise(x, sigma)
        ahead = toward(x, image, sigma, after)
        later = grid.sigmas[i + 1 : min(i + 3, end)]
        weights = [level / ((len(later) + 1) * first) for level in later]
        total = (1.0 - sum(weights)) * slope(x, image, sigma)
        for j, (level, weight) in enumerate(zip(later, weights, strict=True)):
            image = denoise(ahead, level)
            total = total + weight * slope(ahead, image, level)
            if j + 1 < len(later):
                ahead = toward(ahead, image, level, later[j + 1])
        x = x + (after - sigma) * total if later else ahead
        yield x


def dpm2(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """The midpoint method with the middle by log sigma: DPM-Solver-2 as T. Karras et al. (2022) write it."""
    for sigma, after in grid.pairs():
        x = midpoint(x, denoise, sigma, after)
        yield x


def midpoint(x: Array, denoise: Denoiser, sigma: float, after: float) -> Array:
    image = denoise(x, sigma)
    if after == 0:
        return image
    middle = math.sqrt(sigma * after)
    halfway = toward(x, image, sigma, middle)
    return x + (after - sigma) * slope(halfway, denoise(halfway, middle), middle)
