"""Inputs of Flux.1's transformer that are made in numpy: RoPE tables, and sinusoids of time and guidance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.flux_dit import ROPE_THETA, TIME_CHANNELS, FluxConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.numbers.timesteps import TimeDtype, rounded, sinusoids

Grid = tuple[int, int]  # rows and columns of tokens


def image_positions(grids: Sequence[Grid]) -> NDArray[np.int64]:
    """Return the positions [L 3] of the tokens of an image and of a reference: (0, row, column), (1, row, column)."""
    axes = (
        np.meshgrid([index], np.arange(rows), np.arange(columns), indexing="ij")
        for index, (rows, columns) in enumerate(grids)
    )
    return np.concatenate([np.stack(one, axis=-1).reshape(-1, 3) for one in axes]).astype(np.int64)


def image_and_text_rope(config: FluxConfig, grids: Sequence[Grid], length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] for the tokens of an image, and of a reference, of `grids`; and [S, D/2] for `length`
    text tokens, all at 0. In a model that counts them, token i is at (0, i, i), and the corner of image k at (1 + k,
    length, length)."""
    image, text = image_positions(grids), np.zeros((length, 3), np.int64)
    if config.counts_text:
        image += (1, length, length)
        text[:, 1:] = np.arange(length)[:, None]
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
