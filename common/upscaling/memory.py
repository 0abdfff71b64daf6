"""The memory of an upscaler beside its weights, by its configuration: whole, or in bands of rows.

Layers before the last enlarge nothing, so one image of features stays between two of them; a band of the result is made
from there at once, and memory never holds features at the result's size.
"""

from __future__ import annotations

from typing import Any

from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.networks.upscalers.rrdbnet import CONVS, REACH, REACH_OF_END, RRDBNetConfig
from qwenimg.common.networks.upscalers.srvgg import SRVGGConfig

ROWS = (256, 128, 64, 32)  # rows of a band of the features, and of the result
_PIXELS = 16  # bytes of a value of the result while it becomes 8 bits: copies of float32


def activations(config: Any, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None) -> int:
    """Return the peak bytes of enlarging a picture of height x width pixels, in bands of `rows` rows, or whole."""
    result = 3 * height * width * config.scale**2
    if isinstance(config, RRDBNetConfig):
        peak = _rrdbnet(config, -(-height // config.patch), -(-width // config.patch), itemsize, workspace, rows)
    else:
        assert isinstance(config, SRVGGConfig), config
        peak = _srvgg(config, height, width, itemsize, workspace, rows)
    return int(max(peak, result * _PIXELS))


def _rrdbnet(
    config: RRDBNetConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None
) -> float:
    C, dense = config.features, config.features + (CONVS - 1) * config.growth
    features, bands = C * height * width, rows is not None and rows < height
    read = min(height, height if rows is None else rows + 2 * REACH) * width
    block = read * (2 * C + workspace.conv_inputs * dense + workspace.conv_outputs * C)
    body = features * (2 if bands else 1) + max(block, features if bands else 0)
    up = 2**config.enlarged
    kept = height if rows is None else max(1, rows // up)
    pixels = min(height, kept + 2 * REACH_OF_END) * width * up**2
    end = features + pixels * C * (workspace.conv_inputs + workspace.conv_outputs)
    end += 3 * height * width * up**2
    return max(body, end) * itemsize


def _srvgg(
    config: SRVGGConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None
) -> float:
    C = config.features
    widest = max(C, 3 * config.scale**2)
    read = min(height, height if rows is None else rows + 2) * width
    body = C * height * width + read * (workspace.conv_inputs * C + workspace.conv_outputs * widest)
    end = 4 * 3 * config.scale**2 * height * width
    return max(body, end) * itemsize
