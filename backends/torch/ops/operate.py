"""Single operations as the networks compute them, to measure how exact a dtype is on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from qwenimg.backends.torch.ops.attention import attention
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.backends.torch.ops.device import numpy
from qwenimg.backends.torch.ops.functions import residual, silu
from qwenimg.backends.torch.ops.layers import Conv2d, Linear


def operate(operation: str, dtype: torch.dtype, arrays: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """Compute one operation, as `Engine.operate` describes it."""
    operands = [torch.from_numpy(array).to(device).to(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = operands
        return numpy(attention(q, k, v))
    x, weight = operands
    return numpy(_layer(operation, weight)(x))


def layer_seconds(
    operation: str,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    device: torch.device,
    small: bool,
) -> float:
    """Return the seconds of a layer, as `Engine.layer_seconds` describes them."""
    x, weight = (torch.ones(shape, dtype=dtype, device=device) for shape in shapes)
    layer = _layer(operation, laid_out(weight, device.type))
    if device.type != "cpu":
        start = time.perf_counter()
        layer(x).flatten()[0].item()
        return time.perf_counter() - start
    threads, x = torch.get_num_threads(), x.float()  # the residual stream
    torch.set_num_threads(1)
    try:
        start = time.thread_time()
        residual(x, layer(silu(x)))
        return (time.thread_time() - start) / (1 if small else threads)
    finally:
        torch.set_num_threads(threads)


def _layer(operation: str, weight: torch.Tensor) -> Linear | Conv2d:
    outputs, inputs = weight.shape[:2]
    with torch.device("meta"):  # without first values, whose random numbers are the user's
        layer = Linear(inputs, outputs) if operation == "matmul" else Conv2d(inputs, outputs, 3, padding=1)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(weight.new_zeros(outputs), requires_grad=False)
    return layer
