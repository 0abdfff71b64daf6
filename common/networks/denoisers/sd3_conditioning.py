"""Inputs of Stable Diffusion 3's transformer that are made in numpy: positions and time features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers.sd3_dit import PATCH, TIME_CHANNELS, SD3Config
from qwenimg.common.numbers.timesteps import sinusoids

_PERIOD = 10000.0


def window(config: SD3Config, rows: int, columns: int) -> NDArray[np.int64]:
    """Return the indices [1, L] of the middle `rows` x `columns` rows of the position table. Raises UsageError for an
    image larger than the table."""
    size = config.pos_embed_max_size
    if max(rows, columns) > size:
        pixels = size * PATCH * 8
        raise UsageError(
            f"an image of {rows} x {columns} tokens is larger than this model's {size} a side ({pixels} px)"
        )
    top, left = (size - rows) // 2, (size - columns) // 2
    grid = (top + np.arange(rows))[:, None] * size + left + np.arange(columns)
    return grid.reshape(1, -1)


def positions(config: SD3Config, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the rows `ids` [1, L] of the table of positions [1, L, C], by the formula that made it.

    The first half of the channels has the column, the second the row, each as sines, then cosines, of
    place / 10000^(i / (C/4)). A place counts in tokens of the sample size, whatever the size of the table."""
    size = config.pos_embed_max_size
    places = np.arange(size, dtype=np.float32) / np.float32(size / (config.sample_size // PATCH))
    count = config.dim // 4
    angles = places.astype(np.float64)[:, None] * (1.0 / _PERIOD ** (np.arange(count) / count))
    table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1).astype(np.float32)
    return np.concatenate((table[ids % size], table[ids // size]), axis=-1)


def time_rows(timesteps: Sequence[float]) -> NDArray[np.float64]:
    """Return the sinusoids [T, 256] of a schedule's timesteps (0..1000). diffusers rounds them in no precision."""
    return np.stack([sinusoids(timestep, TIME_CHANNELS) for timestep in timesteps])
