"""Inputs of Flux.1's transformer that are made in numpy: RoPE tables, and sinusoids of time and guidance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.flux_dit import ROPE_THETA, TIME_CHANNELS, FluxConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.numbers.timesteps import TimeDtype, rounded, sinusoids

Table = tuple[NDArray[np.float64], NDArray[np.float64]]


def image_and_text_rope(config: FluxConfig, rows: int, columns: int, length: int) -> tuple[Table, Table]:
    """Return (cos, sin) [L, D/2] for the tokens of an image, and [S, D/2] for `length` text tokens, all at 0."""
    grid = np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij")
    image = np.stack(grid, axis=-1).reshape(-1, 3)
    text = np.zeros((length, 3), np.int64)
    first, second = (rope.rope_table(positions, config.axes_dims_rope, ROPE_THETA) for positions in (image, text))
    return first, second


def time_rows(timesteps: Sequence[float], dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoids [T, 256] of a schedule's timesteps (0..1000). In half precision diffusers divides a time by
    1000 and multiplies it again, and rounds each result."""
    return np.stack([_features(rounded(timestep, dtype), dtype) for timestep in timesteps])


def guidance_row(guidance: float, dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoid [1, 256] of a guidance scale, which the model takes times 1000: 3504 for 3.5 in bfloat16."""
    return _features(_nearest(guidance, dtype), dtype)[None]


def _features(value: float, dtype: TimeDtype) -> NDArray[np.float64]:
    return sinusoids(_nearest(1000.0 * value, dtype), TIME_CHANNELS)


def _nearest(value: float, dtype: TimeDtype) -> float:
    return float(nearest(np.array([value], np.float32), dtype)[0])
