"""Inputs of FLUX.3's transformer that are made in numpy: positions, RoPE tables, sinusoids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.flux3_dit import AXES, Flux3Config
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features

Grid = tuple[int, int]  # rows and columns of tokens

SCALE = 0.5  # of rows and columns in positions


def image_positions(grid: Grid, reference: int = 0) -> NDArray[np.float64]:
    """Return the positions [L 4] of the tokens of an image: (0, row / 2, column / 2, 0); of `reference` k, counted from
    1, with -k as the last number."""
    rows, columns = (SCALE * np.arange(count) for count in grid)
    axes = np.meshgrid([0.0], rows, columns, [-float(reference)], indexing="ij")
    return np.stack(axes, axis=-1).reshape(-1, AXES)


def text_positions(length: int) -> NDArray[np.float64]:
    """Return the positions [S 4] of text tokens: (0, 0, 0, number)."""
    positions = np.zeros((length, AXES))
    positions[:, -1] = np.arange(length)
    return positions


def tables(config: Flux3Config, grids: Iterable[Grid], length: int) -> tuple[rope.Table, rope.Table, rope.Table]:
    """Return (cos, sin) [L D/2] for an image and [R D/2] for its references, of `grids`, and between them [S D/2] for
    `length` text tokens."""
    image, *seen = (image_positions(grid, number) for number, grid in enumerate(grids))
    positions = (image, text_positions(length), np.concatenate([np.zeros((0, AXES)), *seen]))
    own, text, others = (rope.rope_table(one, config.axes_dims_rope, config.rope_theta) for one in positions)
    return own, text, others


def time_rows(config: Flux3Config, timestep: float, dtype: TimeDtype, target: float) -> NDArray[np.float64]:
    """Return the sinusoids [2 or 3, channels] of a schedule's timestep (0..1000), of time 0, and in a flow map of the
    timestep that the step goes to, `target`."""
    times = (timestep, 0.0, target) if config.flow_map else (timestep, 0.0)
    return np.stack([timestep_features(time, config.timestep_channels, dtype=dtype) for time in times])


def next_level(levels: Iterable[float], sigma: float) -> float:
    """Return the noise level that a step from `sigma` goes to: the first of the falling `levels` below it, or 0."""
    return max((level for level in levels if level < sigma), default=0.0)
