"""Single operations as the networks compute them, to measure how exact a dtype is on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from qwenimg.backends.mlx.ops.attention import attention
from qwenimg.backends.mlx.ops.device import numpy
from qwenimg.backends.mlx.ops.layers import Conv2d, Linear


def operate(operation: str, dtype: mx.Dtype, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Compute one operation, as `Engine.operate` describes it."""
    operands = [mx.array(array).astype(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = operands
        return numpy(attention(q, k, v))
    x, weight = operands
    if operation == "matmul":
        return numpy(_layer(operation, weight)(x))
    image, kernel = (array.transpose(0, 2, 3, 1) for array in (x, weight))
    return numpy(_layer(operation, kernel)(image).transpose(0, 3, 1, 2))


def layer_seconds(
    operation: str, dtype: mx.Dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], on_gpu: bool
) -> float:
    """Return the seconds of a layer, as `Engine.layer_seconds` describes them."""
    x, weight = (mx.ones(shape, dtype) for shape in shapes)
    if operation == "conv2d":
        x, weight = (array.transpose(0, 2, 3, 1) for array in (x, weight))
    layer = _layer(operation, weight)
    mx.eval(x, layer.weight, layer.bias)
    clock = time.perf_counter if on_gpu else time.process_time  # MLX computes on a thread of its own
    start = clock()
    mx.eval(layer(x))
    return clock() - start


def _layer(operation: str, weight: mx.array) -> Linear | Conv2d:
    """Return a layer with `weight`, [out, in] or [out, 3, 3, in]."""
    outputs, inputs = weight.shape[0], weight.shape[-1]
    layer = Linear(inputs, outputs) if operation == "matmul" else Conv2d(inputs, outputs, 3, padding=1)
    layer.weight, layer.bias = weight, mx.zeros((outputs,), weight.dtype)
    return layer
