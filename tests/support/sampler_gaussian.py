"""A target with exact answers: images are normal with one mean and variance, so the best denoiser is linear in x.

- The ODE keeps (x - alpha mean) / deviation, where deviation^2 = alpha^2 variance + sigma^2.
- A linear denoiser makes every sampler an affine function of its start and its draws: with unit vectors for draws it
  tells the mean and the variance of its results exactly, without a sample.
"""

from __future__ import annotations

import math

import numpy as np

from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.table import Sampler
from qwenimg.common.sampling.types import Schedule

MEAN, VARIANCE = 0.5, 0.49


class Denoiser:
    def __init__(self, grid: Schedule, mean: float = MEAN):
        self.grid, self.mean = grid, mean

    def __call__(self, x, sigma: float):
        alpha = self.grid.alpha(sigma)
        gain = alpha * VARIANCE / spread(self.grid, sigma)
        return gain * x + (1.0 - gain * alpha) * self.mean

    def both(self, x, sigma: float):
        image = self(x, sigma)
        return image, image


def spread(grid: Schedule, sigma: float) -> float:
    """The variance of x."""
    return grid.alpha(sigma) ** 2 * VARIANCE + sigma * sigma


def levels(steps: int, *, flow: bool) -> Schedule:
    """Unequal steps between two levels, the last above 0."""
    high, low = (0.98, 0.05) if flow else (14.6, 0.1)
    top, bottom = high ** (1 / 3), low ** (1 / 3)
    return Schedule(sigmas=tuple((top + (bottom - top) * i / steps) ** 3 for i in range(steps + 1)), flow=flow)


def run(sampler: Sampler, x, grid: Schedule, noise, mean: float = MEAN) -> list:
    more = (lambda array: array,) if sampler.adaptive else ()
    return list(unchanged(sampler.function(x, grid, Denoiser(grid, mean), noise, *more)))


def drawing(steps: int):
    """A function that gives unit vectors, the next one at each call, after the first, which is the start's."""
    count = 0

    def draw() -> np.ndarray:
        nonlocal count
        count += 1
        return unit(count, steps)

    return draw


def unit(index: int, steps: int) -> np.ndarray:
    vector = np.zeros(2 * steps + 2)
    vector[index] = 1.0
    return vector


def moments(sampler: Sampler, grid: Schedule) -> tuple[float, float]:
    """Mean and variance of the sampler's results from a start that is exactly distributed."""
    steps, first = len(grid.sigmas) - 1, grid.sigmas[0]
    start = np.array([grid.alpha(first) * MEAN])
    mean = run(sampler, start, grid, lambda: np.zeros(1))[-1]
    weights = run(sampler, math.sqrt(spread(grid, first)) * unit(0, steps), grid, drawing(steps), mean=0.0)[-1]
    return float(mean[0]), float(weights @ weights)


def exact_ode(x: np.ndarray, grid: Schedule, start: float, end: float) -> np.ndarray:
    kept = math.sqrt(spread(grid, end) / spread(grid, start))
    return grid.alpha(end) * MEAN + kept * (x - grid.alpha(start) * MEAN)
