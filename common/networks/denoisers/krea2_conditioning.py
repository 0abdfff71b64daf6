"""Inputs of Krea 2's transformer that are made in numpy: positions, RoPE tables, sinusoids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features


def positions(grid: tuple[int, int], length: int) -> NDArray[np.int64]:
    """Return the positions [S+L 3] of `length` text tokens, all at 0, and of an image of `grid` tokens, (0, row,
    column)."""
    image = np.stack(np.meshgrid([0], *map(np.arange, grid), indexing="ij"), axis=-1).reshape(-1, 3)
    return np.concatenate([np.zeros((length, 3), np.int64), image.astype(np.int64)])


def table(config: Krea2Config, grid: tuple[int, int], length: int) -> rope.Table:
    """Return (cos, sin) [S+L D/2] for `length` text tokens and an image of `grid` tokens."""
    return rope.rope_table(positions(grid, length), config.axes_dims_rope, config.rope_theta)


def time_row(config: Krea2Config, timestep: float, dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoid [1 channels] of a schedule's timestep (0..1000)."""
    return timestep_features(timestep, config.timestep_embed_dim, dtype=dtype)[None]
