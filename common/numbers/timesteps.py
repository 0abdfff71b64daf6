"""Sinusoids of timesteps, rounded like those that the models were trained with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers.rounding import nearest

TimeDtype = Literal["float32", "bfloat16", "float16"]


def rounded(timestep: float, dtype: TimeDtype) -> float:
    """Return timestep / 1000, both numbers rounded to `dtype`: the time that a diffusers model sees."""
    return _round(_round(timestep, dtype) / 1000.0, dtype)


def timestep_features(timestep: float, channels: int = 256, dtype: TimeDtype = "float32") -> NDArray[np.float64]:
    """Return the sinusoidal features of a time in 0 .. 1000, [channels]: all cosines, then all sines, in float64.

    Angle i is 1000 t / 10000^(2i/channels) (A. Vaswani et al., "Attention Is All You Need", 2017), where t is
    `rounded(timestep, dtype)`. Raises ValueError for a negative time or an odd number of channels.
    """
    if not 0 <= timestep < math.inf or channels % 2:
        raise ValueError(f"time {timestep} has no {channels} features: 0 or more, and an even number of features")
    return sinusoids(1000.0 * rounded(timestep, dtype), channels)


def sinusoids(value: float, channels: int, shift: int = 0) -> NDArray[np.float64]:
    """Return cosines, then sines [channels] of angles value / 10000^(i / (channels/2 - shift)), in float64."""
    half = channels // 2
    frequencies = np.array([math.exp(-math.log(10000.0) * i / (half - shift)) for i in range(half)])
    angles = value * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)])


def unet_sinusoids(
    values: Sequence[float], channels: int, *, cosines_first: bool = True, shift: int = 0
) -> NDArray[np.float64]:
    """Return a UNet's sinusoids of values, [N, channels]: angle i is value / 10000^(i / (channels / 2 - shift))."""
    rows = np.stack([sinusoids(value, channels, shift=shift) for value in values])
    return rows if cosines_first else np.roll(rows, channels // 2, axis=1)


def _round(value: float, dtype: TimeDtype) -> float:
    """Return the nearest value of `dtype`, ties to even, through float32 like half-precision operations."""
    return float(nearest(np.array([value], np.float32), dtype)[0])
