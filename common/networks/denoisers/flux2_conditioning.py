"""Inputs of Flux.2's transformer that are made in numpy: positions, RoPE tables, sinusoids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.flux2_dit import AXES, Flux2Config
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features

Grid = tuple[int, int]  # rows and columns of tokens

REFERENCE_STEP = 10  # between the first numbers of two reference images' positions


def image_positions(grids: Sequence[Grid]) -> NDArray[np.int64]:
    """Return the positions [L 4] of the tokens of an image and of its reference images: (0, row, column, 0), and for
    reference k, counted from 0, (10 + 10 k, row, column, 0)."""
    parts = []
    for index, (rows, columns) in enumerate(grids):
        axes = np.meshgrid([REFERENCE_STEP * index], np.arange(rows), np.arange(columns), [0], indexing="ij")
        parts.append(np.stack(axes, axis=-1).reshape(-1, AXES))
    return np.concatenate(parts).astype(np.int64)


def text_positions(length: int) -> NDArray[np.int64]:
    """Return the positions [S 4] of text tokens: (0, 0, 0, number)."""
    positions = np.zeros((length, AXES), np.int64)
    positions[:, -1] = np.arange(length)
    return positions


def image_and_text_rope(config: Flux2Config, grids: Sequence[Grid], length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] for an image and its references of `grids`, and [S, D/2] for `length` text tokens."""
    axes, theta = config.axes_dims_rope, config.rope_theta
    image, text = image_positions(grids), text_positions(length)
    return rope.rope_table(image, axes, theta), rope.rope_table(text, axes, theta)


def time_rows(
    config: Flux2Config, timestep: float, dtype: TimeDtype, guidance: float | None = None
) -> NDArray[np.float64]:
    """Return the sinusoids [1 or 2, channels] of a schedule's timestep (0..1000) and, with `guidance_embeds`, of the
    guidance."""
    values = [timestep] if guidance is None else [timestep, 1000.0 * guidance]
    return np.stack([timestep_features(value, config.timestep_guidance_channels, dtype=dtype) for value in values])
