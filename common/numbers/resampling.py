"""Latents with more rows and columns: the interpolations of `torch.nn.functional.interpolate`, axis by axis.

Each value is a sum of some others with weights that depend on its place alone, computed in float32 with + and *, so
that every machine has the same bits. The factor is the ratio of the picture's sides, also where the latents were
rounded up to whole patches, so that nothing moves in the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import floor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32: TypeAlias = NDArray[np.float32]
Taps: TypeAlias = list[tuple[int, float]]
"""The values, by their places, that make one of the result, and their weights."""

CUBIC = -0.75  # the free coefficient of the bicubic kernel, as in torch and OpenCV


def resampled(latents: Float32, rows: int, columns: int, factors: tuple[float, float], kind: str) -> Float32:
    """Return latents [..., h, w] as [..., rows, columns]; `factors` along h and w; `kind` is one of KINDS."""
    return _along(_along(latents, -2, rows, factors[0], kind), -1, columns, factors[1], kind)


def _along(latents: Float32, axis: int, size: int, factor: float, kind: str) -> Float32:
    most, taps = latents.shape[axis] - 1, [KINDS[kind](i, factor) for i in range(size)]
    shape = [1] * latents.ndim
    shape[axis] = size
    result = np.float32(0)
    for each in zip(*taps, strict=True):
        places = np.clip([place for place, _ in each], 0, most)
        weights = np.asarray([weight for _, weight in each], np.float32).reshape(shape)
        result = result + weights * np.take(latents, places, axis=axis)
    return np.asarray(result, np.float32)


def _nearest(i: int, factor: float) -> Taps:
    return [(floor(i / factor), 1.0)]


def _nearest_exact(i: int, factor: float) -> Taps:
    return [(floor((i + 0.5) / factor), 1.0)]


def _linear(i: int, factor: float) -> Taps:
    at = max((i + 0.5) / factor - 0.5, 0.0)
    below = floor(at)
    return [(below, 1 - (at - below)), (below + 1, at - below)]


def _cubic(i: int, factor: float) -> Taps:
    at = (i + 0.5) / factor - 0.5
    below = floor(at)
    return [(below + k, _cubic_weight(abs(at - below - k))) for k in (-1, 0, 1, 2)]


def _cubic_weight(distance: float) -> float:
    if distance <= 1:
        return ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    return ((distance - 5) * distance + 8) * distance * CUBIC - 4 * CUBIC


KINDS: Mapping[str, Callable[[int, float], Taps]] = {
    "latent": _linear,
    "latent-nearest": _nearest,
    "latent-nearest-exact": _nearest_exact,
    "latent-bicubic": _cubic,
}
"""The interpolations by the names of --hires-with."""
