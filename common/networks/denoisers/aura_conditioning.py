"""Inputs of AuraFlow's transformer that are made in numpy: rows of the table of positions, and time features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers.aura_dit import PATCH, TIME_CHANNELS, AuraConfig
from qwenimg.common.numbers.timesteps import timestep_features


def window(config: AuraConfig, rows: int, columns: int) -> NDArray[np.int64]:
    """Return the indices [1, L] of the middle `rows` x `columns` tokens of the table of positions. Raises UsageError
    for an image larger than the table.

    A middle of an odd side in an even one begins one later than in Stable Diffusion 3: halves are rounded down before
    they are subtracted."""
    side = config.side
    if max(rows, columns) > side:
        raise UsageError(
            f"an image of {rows} x {columns} tokens is larger than this model's {side} a side ({side * PATCH * 8} px)"
        )
    top, left = side // 2 - rows // 2, side // 2 - columns // 2
    grid = (top + np.arange(rows))[:, None] * side + left + np.arange(columns)
    return grid.reshape(1, -1)


def time_rows(timesteps: Sequence[float]) -> NDArray[np.float64]:
    """Return the sinusoids [T, 256] of a schedule's timesteps (0..1000), rounded as in float32 in every precision."""
    return np.stack([timestep_features(timestep, TIME_CHANNELS) for timestep in timesteps])
