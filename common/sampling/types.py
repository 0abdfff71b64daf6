"""The contract of samplers and the denoise loop: a schedule of noise levels, and the functions that a sampler calls.

One state serves every model: x = alpha denoised + sigma noise, with alpha = 1 for diffusion models (T. Karras et al.,
"Elucidating the Design Space of Diffusion-Based Generative Models", 2022) and alpha = 1 - sigma for flow models. In
both dx/dsigma = (x - denoised) / sigma, so an ODE solver is the same function for both; a solver in half the logarithm
of the signal-to-noise ratio takes `alpha` from the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

# An array of any backend, or a float: supports + - * with itself and with Python floats.
Array: TypeAlias = Any
# Of a sampler: it yields x after each step, and goes on from the x that is sent back.
States: TypeAlias = Generator[Array, Array, None]

MAX_STEPS = 1000  # the most steps of a run


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise levels of a run, falling; the last may be 0. A run starts from `initial` noise and ends with `final`
    x."""

    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...] = ()
    """The model's time at each of `sigmas` but the last."""
    between: tuple[float, ...] = ()
    """The level half-way in time of each step, for PNDM's Runge-Kutta start; a step's jump to a level, for TCD."""
    flow: bool = False
    initial: float = 1.0
    final: float = 1.0

    def alpha(self, sigma: float) -> float:
        return 1.0 - sigma if self.flow else 1.0

    def half_log_snr(self, sigma: float) -> float:
        """Return lambda = log(alpha / sigma): infinite where there is no noise, minus infinite where there is no
        signal."""
        if sigma == 0:
            return math.inf
        alpha = self.alpha(sigma)
        return math.log(alpha / sigma) if alpha > 0 else -math.inf

    def sigma_at(self, half_log_snr: float) -> float:
        """Return the sigma of a finite `half_log_snr`."""
        return 1.0 / (1.0 + math.exp(half_log_snr)) if self.flow else math.exp(-half_log_snr)

    def pairs(self) -> Iterator[tuple[float, float]]:
        """Return the noise levels before and after each step."""
        return pairwise(self.sigmas)


class DenoiseFunction(Protocol):
    """The model with its guidance, as a sampler calls it."""

    def __call__(self, x: Array, sigma: float) -> Array:
        """Return `denoised`: the prediction, from `x` at noise level `sigma`, of x without its noise, guidance
        applied."""
        ...

    def both(self, x: Array, sigma: float) -> tuple[Array, Array]:
        """Return `denoised` with guidance, and `denoised` of the unconditional branch (for CFG++)."""
        ...


class Noise(Protocol):
    def __call__(self) -> Array:
        """Return fresh standard normal noise of x's shape: each call is the next draw of the run's generator."""
        ...
