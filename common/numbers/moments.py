"""Mean and variance of values that arrive in parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32


class Moments(NamedTuple):
    """The moments of `values` numbers, for each of several groups."""

    values: int
    mean: Float64
    squares: Float64  # sum of the squared distances from the mean

    @property
    def variance(self) -> Float64:
        return self.squares / self.values

    def scale(self, eps: float) -> Float64:
        """Return 1 / sqrt(variance + eps), the factor of a norm; NaN where float32 does not hold `squares`, as in a
        norm of all values at once."""
        return np.where(self.squares <= LARGEST, 1 / np.sqrt(self.variance + eps), np.nan)


def moments(count: int, mean: NDArray[Any], squares: NDArray[Any]) -> Moments:
    """Return the moments of one part, in float64."""
    return Moments(count, mean.astype(np.float64), squares.astype(np.float64))


def combined(parts: list[Moments]) -> Moments:
    """Return the moments of all values (T. Chan, G. Golub, R. LeVeque, "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979)."""
    total = parts[0]
    for part in parts[1:]:
        count = total.values + part.values
        apart = part.mean - total.mean
        mean = total.mean + apart * (part.values / count)
        squares = total.squares + part.squares + apart**2 * (total.values * part.values / count)
        total = Moments(count, mean, squares)
    return total
