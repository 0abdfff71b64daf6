"""Inputs of SANA's transformer that are made in numpy: time features and the positions of models for large images."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.sana_dit import TIME_CHANNELS, SanaConfig
from qwenimg.common.numbers.timesteps import sinusoids


def time_rows(config: SanaConfig, timestep: float, guidance: float) -> NDArray[np.float64]:
    """Return the sinusoid [1, 256] of a time, and as a second row that of guidance in a model that takes it."""
    scale = 1.0 if config.guidance_embeds else config.timestep_scale  # its pipeline scales no time
    values = [timestep * scale]
    values += [guidance * config.guidance_embeds_scale] if config.guidance_embeds else []
    return np.stack([sinusoids(float(np.float32(value)), TIME_CHANNELS) for value in values])


def positions(config: SanaConfig, rows: int, columns: int) -> NDArray[np.float64] | None:
    """Return the sinusoids [1, L, C] of an image's positions, columns before rows; None for a model without them. Each
    side has the positions of `sample_size` tokens, however many it has."""
    if (interpolation := config.interpolation_scale) is None:
        return None
    quarter = config.dim // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / quarter)

    def along(count: int) -> NDArray[np.float64]:
        places = np.arange(count) / (count / config.sample_size) / interpolation
        angles = np.outer(places, frequencies)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    across, down = along(columns), along(rows)
    table = np.concatenate([np.tile(across, (rows, 1)), np.repeat(down, columns, axis=0)], axis=1)
    return table[None]
