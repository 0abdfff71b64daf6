"""Inputs of Stable Cascade's UNets that are made in numpy: the sinusoids of the time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.cascade_unet import CascadeConfig
from qwenimg.common.numbers.timesteps import unet_sinusoids

_SCALE = 10000.0  # of a time from 0 to 1


def time_row(config: CascadeConfig, time: float) -> NDArray[np.float64]:
    """Return the sines, then cosines, of a time from 0 to 1, and behind them those of each further value, which is 0:
    [1, (1 + values) channels]."""
    values = [_SCALE * time, *[0.0] * (config.times - 1)]
    rows = unet_sinusoids(values, config.timestep_ratio_embedding_dim, cosines_first=False, shift=1)
    return rows.reshape(1, -1)
