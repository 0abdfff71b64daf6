"""Inputs of Z-Image's transformer that are made in numpy: pads, RoPE tables, time features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers.zimage_dit import TIME_CHANNELS, ZImageConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, timestep_features

MULTIPLE = 32  # of tokens: image and text are each padded to one


def padded(tokens: int) -> int:
    """Return the number of `tokens` with their pads."""
    return tokens + -tokens % MULTIPLE


def image_and_text_rope(config: ZImageConfig, rows: int, columns: int, length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] of an image's tokens with their pads, and [S, D/2] of a text of `length` tokens with
    its pads. Raises UsageError if they do not fit the model's table of positions."""
    text = np.zeros((padded(length), 3), np.int64)
    text[:, 0] = 1 + np.arange(len(text))
    image = np.zeros((padded(rows * columns), 3), np.int64)  # pads stay at (0, 0, 0)
    grid = np.meshgrid([1 + len(text)], np.arange(rows), np.arange(columns), indexing="ij")
    image[: rows * columns] = np.stack(grid, axis=-1).reshape(-1, 3)
    if np.any(image.max(axis=0) >= config.axes_lens):
        raise UsageError(
            f"{len(text)} text tokens and an image of {rows} x {columns} tokens do not fit below the positions "
            f"{list(config.axes_lens)}; choose a smaller image or a shorter prompt"
        )
    first, second = (rope.rope_table(positions, config.axes_dims, config.rope_theta) for positions in (image, text))
    return first, second


def time_row(timestep: float, dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoid [1, 256] of 1 - t/1000 for a schedule's timestep t (0..1000): the model's time runs from
    noise to image."""
    return timestep_features(1000.0 - timestep, TIME_CHANNELS, dtype=dtype)[None]
