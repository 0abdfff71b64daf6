"""Inputs of Hunyuan-DiT's transformer that are made in numpy: rotations, and sinusoids of the time and of sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.hunyuan_dit import CONDITION_CHANNELS, HunyuanConfig
from qwenimg.common.numbers.timesteps import sinusoids

_BASE = 32  # tokens along a side of the square in which places are counted, that of 512 pixels
_PERIOD = 10000.0
_ORIGINAL = 1024  # pixels along a side of the picture from which a picture of the training was cut


def rope(config: HunyuanConfig, grid: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cosines and sines [L, D/2] for an image of `grid` rows and columns of tokens: of the column in the first
    half of the pairs, of the row in the second."""
    rows, columns = places(grid)
    frequencies = 1.0 / _PERIOD ** (np.arange(config.attention_head_dim // 4) * 4 / config.attention_head_dim)
    shape = (*grid, len(frequencies))
    row, column = np.multiply.outer(rows, frequencies), np.multiply.outer(columns, frequencies)
    both = np.broadcast_to(column[None], shape), np.broadcast_to(row[:, None], shape)
    angles = np.concatenate(both, axis=-1).reshape(-1, config.attention_head_dim // 2)
    return np.cos(angles), np.sin(angles)


def places(grid: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the places of rows and columns: the image is scaled so that its longer side is that of a square, and the
    shorter lies in the middle; both in whole tokens of the square."""
    height, width = grid
    longer = max(height, width)
    return _side(round(_BASE / longer * height), height), _side(round(_BASE / longer * width), width)


def _side(length: int, count: int) -> NDArray[np.float64]:
    return np.arange(count, dtype=np.float64) * (length / count) + round((_BASE - length) / 2)


def time_row(timestep: float) -> NDArray[np.float64]:
    """Return the sinusoids [1, 256] of a timestep (0..999)."""
    return sinusoids(timestep, CONDITION_CHANNELS)[None]


def size_row(height: int, width: int) -> NDArray[np.float64]:
    """Return the sinusoids [1, 6 * 256] of the height and width in pixels of the original, of the picture, and of its
    place in the original."""
    values = (_ORIGINAL, _ORIGINAL, height, width, 0, 0)
    return np.concatenate([sinusoids(value, CONDITION_CHANNELS) for value in values])[None]
