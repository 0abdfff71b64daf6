"""Spherical interpolation of noise, the same bits on every machine (K. Shoemake, 1985): each column of each channel is
a vector of its own, as in AUTOMATIC1111's web UI. Where two of them point the same or the opposite way they are mixed
linearly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import portable_math

_LEAST_SINE = 1e-6  # of the angle between two vectors that are not mixed linearly
# acos(x) = sqrt(1 - x) * polynomial within 7e-5 (M. Abramowitz and I. A. Stegun, 4.4.45); Newton's steps do the rest.
_ACOS = (1.5707288, -0.2121144, 0.0742610, -0.0187293)
_NEWTON = 3


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
