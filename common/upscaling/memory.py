"""The memory of an upscaler beside its weights, by its configuration: whole, or in bands of rows.

Layers before the last enlarge nothing, so one image of features stays between two of them; a band of the result is made
from there at once, and memory never holds features at the result's size.
"""

from __future__ import annotations

from math import prod
from typing import Any

from qwenimg.common.base.shape import Manifest
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.networks.upscalers.rrdbnet import CONVS, REACH, REACH_OF_END, RRDBNetConfig
from qwenimg.common.networks.upscalers.srvgg import SRVGGConfig

ROWS = (256, 128, 64, 32)  # rows of a band of the features, and of the result
_PIXELS = 10  # bytes of a value of the result while it becomes 8 bits: two copies of float32, and two of the bytes
# The shares of a workspace's copies of images that these convolutions take, which are alike; measured on both backends
_INPUTS, _OUTPUTS = 0.89, 0.61


def activations(config: Any, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None) -> int:
    """Return the peak bytes of enlarging a picture of height x width pixels, in bands of `rows` rows, or whole."""
    result = 3 * height * width * config.scale**2
    if isinstance(config, RRDBNetConfig):
        peak = _rrdbnet(config, -(-height // config.patch), -(-width // config.patch), itemsize, workspace, rows)
    else:
        assert isinstance(config, SRVGGConfig), config
        peak = _srvgg(config, height, width, itemsize, workspace, rows)
    return int(max(peak, result * _PIXELS))


def operations(config: Any, shapes: Manifest, height: int, width: int) -> float:
    """Return the multiplications and additions of enlarging a picture of height x width pixels with weights of these
    `shapes`."""
    enlarged = config.enlarged if isinstance(config, RRDBNetConfig) else 0
    patch = config.patch if isinstance(config, RRDBNetConfig) else 1
    larger = {f"conv_up{i + 1}.weight": 1 << 2 * (i + 1) for i in range(enlarged)}
    larger |= dict.fromkeys(("conv_hr.weight", "conv_last.weight"), 1 << 2 * enlarged)
    each = sum(2.0 * prod(shape) * larger.get(name, 1) for name, shape in shapes.items())
    return each * height * width / patch**2


def _rrdbnet(
    config: RRDBNetConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None
) -> float:
    C, dense = config.features, config.features + (CONVS - 1) * config.growth
    features, bands = C * height * width, rows is not None and rows < height
    read = min(height, height if rows is None else rows + 2 * REACH) * width
    block = read * (2 * C + _convolved(workspace, dense, C))
    body = features * (2 if bands else 1) + max(block, features if bands else 0)
    up = 1 << config.enlarged
    kept = height if rows is None else max(1, rows // up)
    pixels = min(height, kept + 2 * REACH_OF_END) * width * up**2
    end = features + pixels * _convolved(workspace, C, C)
    end += 3 * height * width * up**2
    return max(body, end) * itemsize


def _convolved(workspace: Workspace, inputs: int, outputs: int) -> float:
    """Return the values, for each pixel, in memory while a convolution runs."""
    return _INPUTS * workspace.conv_inputs * inputs + _OUTPUTS * workspace.conv_outputs * outputs


def _srvgg(
    config: SRVGGConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int | None
) -> float:
    C = config.features
    widest = max(C, 3 * config.scale**2)
    read = min(height, height if rows is None else rows + 2) * width
    body = (C * height * width if rows is not None else 0) + read * _convolved(workspace, C, widest)
    end = 2 * 3 * config.scale**2 * height * width  # the last layer, and the picture with each pixel repeated
    return max(body, end) * itemsize
