"""Inputs of PixArt's transformer that are made in numpy: positions, and sinusoids of the time and of sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.pixart_dit import CONDITION_CHANNELS, PixArtConfig
from qwenimg.common.numbers.timesteps import sinusoids

_PERIOD = 10000.0


def positions(config: PixArtConfig, grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return the positions [1, L, C] of an image of `grid` rows and columns of tokens.

    The first half of the channels has the column, the second the row, each as sines, then cosines, of
    place / 10000^(i / (C/4)). Places run over the same range in images of all sizes."""
    rows, columns = (_side(config, count) for count in grid)
    shape = (*grid, config.dim // 2)
    both = np.broadcast_to(columns[None], shape), np.broadcast_to(rows[:, None], shape)
    return np.concatenate(both, axis=-1).reshape(1, -1, config.dim)


def _side(config: PixArtConfig, count: int) -> NDArray[np.float64]:
    """Return the sines and cosines [count, C/2] of the places along a side."""
    places = np.arange(count) * config.base / (count * config.scale)
    quarter = config.dim // 4
    angles = places[:, None] / _PERIOD ** (np.arange(quarter) / quarter)
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)


def time_row(timestep: float) -> NDArray[np.float64]:
    """Return the sinusoids [1, 256] of a timestep (0..999)."""
    return sinusoids(timestep, CONDITION_CHANNELS)[None]


def size_rows(height: int, width: int) -> NDArray[np.float64]:
    """Return the sinusoids [3, 256] of height and width in pixels, and of their ratio."""
    return np.stack([sinusoids(value, CONDITION_CHANNELS) for value in (height, width, height / width)])
