"""The variation of a seed: its noise, turned towards the noise of a second seed, the same bits on every machine.

It is spherical interpolation (K. Shoemake, 1985) as AUTOMATIC1111's web UI does it: each column of each channel is a
vector of its own. Where two of them point the same or the opposite way they are mixed linearly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers import portable_math
from qwenimg.common.numbers.noise import check_seed, normal

_TEXT = re.compile(r"([0-9]{1,20}):([0-9]{1,3}|[0-9]{0,3}\.[0-9]{1,17})", re.ASCII)
_LEAST_SINE = 1e-6  # of the angle between two vectors that are not mixed linearly
# acos(x) = sqrt(1 - x) * polynomial within 7e-5 (M. Abramowitz and I. A. Stegun, 4.4.45); Newton's steps do the rest.
_ACOS = (1.5707288, -0.2121144, 0.0742610, -0.0187293)
_NEWTON = 3
_DIGITS = 17  # of a strength, behind the point, as in _TEXT


@dataclass(frozen=True)
class Variation:
    """A second seed, and how far the noise is turned towards its noise: 0 not at all, 1 all the way."""

    seed: int
    strength: float

    def __str__(self) -> str:
        return f"{self.seed}:{np.format_float_positional(self.strength, _DIGITS, trim='0')}"

    def next(self, count: int) -> Variation:
        """Return the variation whose seed is larger by `count`. Raises UsageError."""
        check_seed(self.seed + count)
        return Variation(self.seed + count, self.strength)

    def applied(self, noise: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return `noise` [..., h, w], turned towards that of the second seed."""
        return slerp(self.strength, noise, normal(noise.shape, self.seed)) if self.strength else noise


def parse(text: str) -> Variation:
    """Return the variation of `SEED:STRENGTH`. Raises UsageError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or float(match[2]) > 1:
        raise UsageError(f"variation is {clean(text, 40)!r}; expected SEED:STRENGTH, of 0 to 1, as 7:0.2")
    check_seed(int(match[1]))
    return Variation(int(match[1]), float(match[2]))


def check(text: str) -> None:
    """Raise UsageError for a text, other than "", that is no variation."""
    if text:
        parse(text)


def slerp(share: float, low: NDArray[np.float32], high: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return low at a share of 0, high at 1, and between them each column [h] of [..., h, w] turned."""
    a, b = low.astype(np.float64), high.astype(np.float64)
    lengths = np.sqrt(_dot(a, a)) * np.sqrt(_dot(b, b))
    cosine = np.clip(_dot(a, b) / np.where(lengths == 0, 1, lengths), -1, 1)
    angle = _acos(cosine)
    sine, _ = portable_math.sincos(angle)
    turned = (lengths != 0) & (sine > _LEAST_SINE)
    below = np.where(turned, sine, 1)
    first, _ = portable_math.sincos((1 - share) * angle)
    second, _ = portable_math.sincos(share * angle)
    of_low, of_high = np.where(turned, first / below, 1 - share), np.where(turned, second / below, share)
    mixed: NDArray[np.float32] = (of_low[..., None, :] * a + of_high[..., None, :] * b).astype(np.float32)
    return mixed


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the dot products of columns, [..., h, w] -> [..., w], added row by row: numpy's sum has another order on
    each kind of CPU."""
    total: NDArray[np.float64] = np.zeros((*a.shape[:-2], a.shape[-1]))
    for row in range(a.shape[-2]):
        total += a[..., row, :] * b[..., row, :]
    return total


def _acos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    size = np.abs(x)
    angle = np.full(x.shape, _ACOS[-1])
    for term in _ACOS[-2::-1]:
        angle = angle * size + term
    angle = np.sqrt(1 - size) * angle
    for _ in range(_NEWTON):
        sine, cosine = portable_math.sincos(angle)
        angle = angle + (cosine - size) / np.where(sine > _LEAST_SINE, sine, 1)
    whole: NDArray[np.float64] = np.where(x < 0, np.pi - angle, angle)
    return whole
