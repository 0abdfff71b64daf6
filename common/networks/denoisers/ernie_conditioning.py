"""Inputs of ERNIE-Image's transformer that are made in numpy: positions, RoPE tables, sinusoids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import sinusoids

Table = NDArray[np.float64]


def tables(config: ErnieConfig, grid: tuple[int, int], length: int) -> tuple[Table, Table]:
    """Return the tables of an image of `grid` rows and columns of tokens, [L 1 2D], and of `length` text tokens, [S 1
    2D]: for each channel of a head the cosine of its angle, then the sine, negative in the first half."""
    axes = np.meshgrid([length], *map(np.arange, grid), indexing="ij")
    text = np.zeros((length, 3), np.int64)
    text[:, 0] = np.arange(length)
    image = np.stack(axes, axis=-1).reshape(-1, 3).astype(np.int64)
    return _table(config, image), _table(config, text)


def _table(config: ErnieConfig, positions: NDArray[np.int64]) -> Table:
    angles = np.repeat(rope.rope_angles(positions, config.rope_axes_dim, config.rope_theta), 2, axis=1)
    cos, sin = np.cos(angles), np.sin(angles)
    sin[:, : config.head_dim // 2] *= -1
    return np.concatenate([cos, sin], axis=1)[:, None]


def time_row(config: ErnieConfig, timestep: float) -> NDArray[np.float64]:
    """Return the sinusoid [1 C] of a schedule's timestep (0..1000)."""
    return np.roll(sinusoids(timestep, config.dim), config.dim // 2)[None]
