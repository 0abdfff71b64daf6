"""The inputs of networks over patches that compute one branch of guidance at a time, without references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paper.kernels import Case
from qwenimg.common.networks.denoisers.anima_dit import AnimaConfig
from qwenimg.common.networks.denoisers.ernie_dit import ErnieConfig
from qwenimg.common.networks.denoisers.flux2_dit import Flux2Config
from qwenimg.common.networks.denoisers.flux3_dit import Flux3Config
from qwenimg.common.networks.denoisers.krea2_dit import Krea2Config
from qwenimg.common.networks.denoisers.lumina_dit import LuminaConfig
from qwenimg.common.networks.denoisers.pixart_dit import PixArtConfig
from qwenimg.common.networks.denoisers.sana_dit import SanaConfig
from qwenimg.common.networks.denoisers.zimage_dit import PATCH

Grid = tuple[int, int]
Inputs = tuple[int, tuple[Any, ...], NDArray[np.float64]]
"""The width of text states, what `condition` takes behind them, and sinusoids of a step."""

INPUTS: dict[type, Callable[[Any, Grid], Inputs]] = {
    Flux2Config: lambda config, grid: (
        config.joint_attention_dim,
        (([grid], []),),
        np.zeros((1 + config.guidance_embeds, config.timestep_guidance_channels)),
    ),
    Flux3Config: lambda config, grid: (
        config.joint_attention_dim,
        (([grid], []),),
        np.zeros((2 + config.flow_map, config.timestep_channels)),
    ),
    AnimaConfig: lambda config, grid: (config.text_embed_dim, (grid,), np.zeros((1, config.dim))),
    LuminaConfig: lambda config, grid: (config.cap_feat_dim, (grid,), np.zeros((1, 256))),
    ErnieConfig: lambda config, grid: (config.text_in_dim, (grid,), np.zeros((1, config.dim))),
    Krea2Config: lambda config, grid: (config.states, (grid,), np.zeros((1, config.timestep_embed_dim))),
    PixArtConfig: lambda config, grid: (
        config.caption_channels,
        (grid, np.zeros((3, 256)) if config.sees_size else None),
        np.zeros((1, 256)),
    ),
    SanaConfig: lambda config, grid: (config.caption_channels, (grid,), np.zeros((1 + config.guidance_embeds, 256))),
}
UNPACKED = (LuminaConfig, PixArtConfig, SanaConfig)
"""Networks that take latents as they are."""


def latents(config: Any, case: Case) -> tuple[int, ...]:
    """Return the shape of a network's latents."""
    if isinstance(config, UNPACKED):
        return 1, config.in_channels, case.height, case.width
    rows, columns = _grid(config, case)
    return 1, rows * columns, 4 * config.in_channels if isinstance(config, AnimaConfig) else config.in_channels


def inputs(config: Any, case: Case) -> Inputs:
    """Return the inputs of a network with the configuration `config`."""
    return INPUTS[type(config)](config, _grid(config, case))


def _grid(config: Any, case: Case) -> Grid:
    side = 1 if isinstance(config, SanaConfig) else PATCH
    return case.height // side, case.width // side
