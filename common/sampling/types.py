"""What samplers and the denoise loop agree on: a schedule of noise levels, and the functions that a sampler is given.

One state serves every model: x = alpha denoised + sigma noise, with alpha = 1 for diffusion models (T. Karras et al.,
"Elucidating the Design Space of Diffusion-Based Generative Models", 2022) and alpha = 1 - sigma for flow models. In
both dx/dsigma = (x - denoised) / sigma, so an ODE solver is the same function for both; a solver in half the logarithm
of the signal-to-noise ratio takes `alpha` from the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

# An array of any backend, or a float: supports + - * with itself and with Python floats.
Array: TypeAlias = Any

MAX_STEPS = 1000  # of a run


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Noise levels of a run, falling; the last may be 0. A run starts from `initial` noise and ends with `final` x."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...] = ()
    """The model's time at each of `sigmas` but the last."""
    between: tuple[float, ...] = ()
    """For PNDM's Runge-Kutta start the level half-way in time of each step; for TCD the level that a step jumps to."""
    flow: bool = False
    initial: float = 1.0
    final: float = 1.0

    def alpha(self, sigma: float) -> float:
        return 1.0 - sigma if self.flow else 1.0

    def half_log_snr(self, sigma: float) -> float:
        """lambda = log(alpha / sigma): infinite where there is no noise, minus infinite where nothing else is."""
        if sigma == 0:
            return math.inf
        alpha = self.alpha(sigma)
        return math.log(alpha / sigma) if alpha > 0 else -math.inf

    def sigma_at(self, half_log_snr: float) -> float:
        """The inverse of `half_log_snr`, for finite values."""
        return 1.0 / (1.0 + math.exp(half_log_snr)) if self.flow else math.exp(-half_log_snr)

    def pairs(self) -> Iterator[tuple[float, float]]:
        """The noise levels before and after each step."""
        return pairwise(self.sigmas)


class Denoiser(Protocol):
    """The model with its guidance."""

    def __call__(self, x: Array, sigma: float) -> Array:
        """`denoised`: the prediction, from `x` at noise level `sigma`, of x without its noise, guidance applied."""
        ...

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        """The same with guidance, and as predicted without the prompt (for CFG++)."""
        ...


class Noise(Protocol):
    def __call__(self) -> Array:
        """Fresh standard normal noise of x's shape: each call the next draw of the run's generator."""
        ...
