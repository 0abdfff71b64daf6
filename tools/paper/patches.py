"""The inputs of networks over patches that compute one branch of guidance at a time, without references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config

Grid = tuple[int, int]
Inputs = tuple[int, Any, NDArray[np.float64]]
"""The width of text states, the grid as `condition` takes it, and sinusoids of a step."""

INPUTS: dict[type, Callable[[Any, Grid], Inputs]] = {
    Flux2Config: lambda config, grid: (
        config.joint_attention_dim,
        ([grid], []),
        np.zeros((1 + config.guidance_embeds, config.timestep_guidance_channels)),
    ),
    Flux3Config: lambda config, grid: (
        config.joint_attention_dim,
        ([grid], []),
        np.zeros((2 + config.flow_map, config.timestep_channels)),
    ),
    ErnieConfig: lambda config, grid: (config.text_in_dim, grid, np.zeros((1, config.dim))),
    Krea2Config: lambda config, grid: (config.states, grid, np.zeros((1, config.timestep_embed_dim))),
}


def inputs(config: Any, grid: Grid) -> Inputs:
    """Return the inputs of a network with the configuration `config`."""
    return INPUTS[type(config)](config, grid)
