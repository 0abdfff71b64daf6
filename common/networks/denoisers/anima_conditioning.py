"""Inputs of Anima's transformer that are made in numpy: RoPE tables, sinusoids."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.numbers import rope
from qwenimg.common.numbers.timesteps import TimeDtype, rounded, sinusoids

THETA = 1e4


def table(config: AnimaConfig, grid: tuple[int, int]) -> rope.Table:
    """Return (cos, sin) [L D/2] for an image of `grid` rows and columns of tokens, the only frame. The base of an axis
    of width d grows with its scale by scale^(d / (d - 2))."""
    places = np.indices((1, *grid)).reshape(3, -1)
    angles = [
        rope.rope_angles(numbers[:, None], (width,), THETA * scale ** (width / (width - 2)))
        for numbers, width, scale in zip(places, config.axes, config.rope_scale, strict=True)
    ]
    turned = np.concatenate(angles, axis=1)
    return np.cos(turned), np.sin(turned)


def time_row(config: AnimaConfig, timestep: float, dtype: TimeDtype) -> NDArray[np.float64]:
    """Return the sinusoid [1 C] of a schedule's timestep (0..1000), as a time in 0..1."""
    return sinusoids(rounded(timestep, dtype), config.dim)[None]
