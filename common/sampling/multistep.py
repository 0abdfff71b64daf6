"""Samplers that use what the model said in earlier steps: one evaluation a step, whatever their order.

Those that work with dx/dsigma are the same for diffusion and flow models; the exponential ones work in lambda =
log(alpha / sigma). An earlier level without signal has lambda = minus infinity, and its answer weighs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from qwenimg.common.sampling.steps import adams, gain, growth, slope, toward, weighted
from qwenimg.common.sampling.types import Array, Denoiser, Grid, Noise

# Adams and Bashforth's weights for equal steps, the newest slope first.
_EQUAL = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))
_FEW = 15  # steps of a run whose last step is one of first order, as DPM-Solver's authors advise


def pndm(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Pseudo numerical methods (L. Liu et al., "Pseudo Numerical Methods for Diffusion Models on Manifolds", 2022):
    Adams and Bashforth's four-step rule on the noise. It starts with Runge and Kutta's method where the grid has
    levels in between, else with Heun's (K. Crowson's PLMS)."""
    slopes: list[Array] = []
    for i, (sigma, after) in enumerate(grid.pairs()):
        image = denoise(x, sigma)
        slopes = [slope(x, image, sigma), *slopes[:3]]
        if grid.between and i < 3 and after > 0:
            total = _runge_kutta(x, slopes[0], denoise, sigma, grid.between[i], after)
        elif i == 0 and after > 0:
            ahead = toward(x, image, sigma, after)
            total = 0.5 * (slopes[0] + slope(ahead, denoise(ahead, after), after))
        else:
            total = weighted(slopes, _EQUAL[len(slopes) - 1])
        x = x + (after - sigma) * total
        yield x


def _runge_kutta(x: Array, first: Array, denoise: Denoiser, sigma: float, middle: float, after: float) -> Array:
    def ahead(known: Array, level: float) -> Array:
        reached = x + (level - sigma) * known
        return slope(reached, denoise(reached, level), level)

    second = ahead(first, middle)
    third = ahead(second, middle)
    return weighted([first, second, third, ahead(third, after)], [1 / 6, 1 / 3, 1 / 3, 1 / 6])


def lms(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Linear multistep of order 4: Adams and Bashforth's rule for the grid's own spacing (K. Crowson,
    "k-diffusion", 2022, after T. Karras et al.)."""
    return _adams(x, grid, denoise, to_image=False)


def ipndm_v(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """iPNDM for unequal steps (Q. Zhang, Y. Chen, "Fast Sampling of Diffusion Models with Exponential Integrator",
    2023): the same weights as `lms`, but a step to sigma = 0 gives the model's image."""
    return _adams(x, grid, denoise, to_image=True)


def _adams(x: Array, grid: Grid, denoise: Denoiser, *, to_image: bool) -> Iterator[Array]:
    slopes: list[Array] = []
    for i, (sigma, after) in enumerate(grid.pairs()):
        image = denoise(x, sigma)
        slopes = [slope(x, image, sigma), *slopes[:3]]
        if to_image and after == 0:
            x = image
        else:
            nodes = grid.sigmas[i::-1][:4]
            x = x + weighted(slopes, adams(nodes, after))
        yield x


def ipndm(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Improved PNDM (Q. Zhang, Y. Chen, 2023): Adams and Bashforth's weights for equal steps, started with lower
    orders; a step to sigma = 0 gives the model's image."""
    slopes: list[Array] = []
    for sigma, after in grid.pairs():
        image = denoise(x, sigma)
        slopes = [slope(x, image, sigma), *slopes[:3]]
        x = image if after == 0 else x + (after - sigma) * weighted(slopes, _EQUAL[len(slopes) - 1])
        yield x


def deis(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """DEIS tAB2 in log rho, rho = sigma / alpha (Q. Zhang, Y. Chen, 2023): the noise on a line, integrated exactly."""
    previous, last = None, 0.0
    for i, (sigma, after) in enumerate(grid.pairs()):
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        eps = (1.0 / sigma) * (x - grid.alpha(sigma) * image)
        x = toward(x, image, sigma, after)
        if previous is not None and math.isfinite(last) and after > 0 and not _last_of_few(grid, i):
            rho = sigma / grid.alpha(sigma)
            weight = grid.alpha(after) * rho * (math.expm1(-h) + h * math.exp(-h)) / last
            x = x + weight * (eps - previous)
        previous, last = eps, h
        yield x


def dpmpp_2m(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """DPM-Solver++(2M) (C. Lu et al., "DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic
    Models", 2022)."""
    previous, last = None, 0.0
    for i, (sigma, after) in enumerate(grid.pairs()):
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        seen = image
        if previous is not None and after > 0 and not _last_of_few(grid, i):
            weight = h / (2.0 * last)
            seen = (1.0 + weight) * image - weight * previous
        x = toward(x, seen, sigma, after)
        previous, last = image, h
        yield x


def _last_of_few(grid: Grid, step: int) -> bool:
    steps = len(grid.sigmas) - 1
    return step == steps - 1 and steps < _FEW


def res_multistep(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """RES, the multistep form of second order: the image on a line in lambda, integrated exactly (Q. Zhang et al.,
    "Improved Order Analysis and Design of Exponential Integrator for Diffusion Models Sampling", 2023)."""
    previous, last = None, 0.0
    for sigma, after in grid.pairs():
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        x = toward(x, image, sigma, after)
        if previous is not None and after > 0:
            x = x + (grid.alpha(after) * (h - gain(h, 0.0)) / last) * (image - previous)
        previous, last = image, h
        yield x


def unipc(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """UniPC-2 with B(h) = exp(h) - 1: each step is predicted, then corrected by what the model says of the
    prediction, which costs no evaluation more (W. Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for
    Fast Sampling of Diffusion Models", 2023)."""
    before, sigma_before = x, 0.0  # where the last step began
    images: list[Array] = []  # seen at the start of the last step and of the one before it
    steps: list[float] = []  # how much those steps made lambda grow
    for i, (sigma, after) in enumerate(grid.pairs()):
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        if images and math.isfinite(steps[0]):
            x = _corrected(before, grid, sigma_before, sigma, [image, *images], steps)
        images, before, sigma_before = [image, *images[:1]], x, sigma
        seen = image
        if len(images) == 2 and i < len(grid.sigmas) - 2:  # the last step is one of first order
            weight = h / (2.0 * steps[0])
            seen = (1.0 + weight) * image - weight * images[1]
        x = toward(x, seen, sigma, after)
        steps = [h, *steps[:1]]
        yield x


def _corrected(
    x: Array, grid: Grid, sigma: float, after: float, images: Sequence[Array], steps: Sequence[float]
) -> Array:
    """The step from `sigma` to `after` again, with the image seen at its end: images from the newest to the oldest."""
    h, now, start = steps[0], images[0], images[1]
    size = grid.alpha(after) * gain(h, 0.0)
    moved = toward(x, start, sigma, after)
    if len(steps) == 1 or math.isinf(steps[1]):
        return moved + (0.5 * size) * (now - start)
    ratio, g = -steps[1] / h, gain(h, 0.0)
    moment, second = 1.0 / g - 1.0 / h, (1.0 - 2.0 * (1.0 - g / h) / h) / g
    older = (moment - second) / (1.0 - ratio)
    return moved + size * ((older / ratio) * (images[2] - start) + (moment - older) * (now - start))
