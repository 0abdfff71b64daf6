"""Inputs of Chroma's approximator that are made in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.chroma_dit import ChromaConfig
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.numbers.timesteps import TimeDtype, rounded, sinusoids


def features(config: ChromaConfig, timesteps: Sequence[float], dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the inputs [T, vectors, channels] for a schedule's timesteps (0..1000): sinusoids of the time, of 0 for a
    guidance, and of each vector's number."""
    quarter = config.approximator_num_channels // 4
    numbers, none = _numbered(config.vectors, 2 * quarter), sinusoids(0.0, quarter)
    rows = []
    for timestep in timesteps:
        time = float(nearest(np.array([1000.0 * rounded(timestep, dtype)], np.float32), dtype)[0])
        both = np.concatenate([sinusoids(time, quarter), none])
        rows.append(np.concatenate([np.broadcast_to(both, (config.vectors, 2 * quarter)), numbers], axis=1))
    return np.stack(rows)


def _numbered(count: int, channels: int) -> NDArray[np.float64]:
    """Return the sinusoids [count, channels] of 0, 1000, 2000 ..., whose angles are rounded to float32, as the model
    has seen them: they reach 343,000, where that is 0.03 radians."""
    half = channels // 2
    exponents = np.float32(-math.log(10000.0)) * np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = (np.arange(count, dtype=np.float32)[:, None] * np.float32(1000) * frequencies).astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
