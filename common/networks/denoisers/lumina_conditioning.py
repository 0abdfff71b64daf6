"""Inputs of Lumina-Image 2.0's transformer that are made in numpy: RoPE tables and time features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.networks.denoisers.lumina_dit import ROPE_THETA, LuminaConfig
from qwenimg.common.networks.denoisers.zimage_dit import TIME_CHANNELS
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import sinusoids


def image_and_text_rope(config: LuminaConfig, rows: int, columns: int, length: int) -> tuple[rope.Table, rope.Table]:
    """Return (cos, sin) [L, D/2] of an image's tokens, and [S, D/2] of a text of `length` tokens. Raises UsageError if
    they do not fit the model's table of positions."""
    if any(value >= most for value, most in zip((length, rows - 1, columns - 1), config.axes_lens, strict=True)):
        raise UsageError(
            f"{length} text tokens and an image of {rows} x {columns} tokens do not fit below the positions "
            f"{list(config.axes_lens)}; choose a smaller image or a shorter prompt"
        )
    text = np.zeros((length, 3), np.int64)
    text[:, 0] = np.arange(length)
    grid = np.meshgrid([length], np.arange(rows), np.arange(columns), indexing="ij")
    image = np.stack(grid, axis=-1).reshape(-1, 3)
    first, second = (rope.rope_table(positions, config.axes_dims, ROPE_THETA) for positions in (image, text))
    return first, second


def time_row(timestep: float) -> NDArray[np.float64]:
    """Return the sinusoid [1, 256] of 1 - t/1000 for a schedule's timestep t (0..1000): the model's time runs from
    noise to image, and its pipeline rounds it to float32 alone, in every precision."""
    return sinusoids(1.0 - timestep / 1000.0, TIME_CHANNELS)[None]
