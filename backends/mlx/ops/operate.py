"""Single operations as the networks compute them, to measure how exact a dtype is on this device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from qwenimg.backends.mlx.ops.attention import attention
from qwenimg.backends.mlx.ops.device import numpy
from qwenimg.backends.mlx.ops.layers import Conv2d, Linear


def operate(operation: str, dtype: mx.Dtype, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """`Engine.operate`."""
    given = [mx.array(array).astype(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = given
        return numpy(attention(q, k, v))
    x, weight = given
    outputs, inputs = weight.shape[:2]
    if operation == "matmul":
        linear = Linear(inputs, outputs)
        linear.weight, linear.bias = weight, mx.zeros((outputs,), dtype)
        return numpy(linear(x))
    conv = Conv2d(inputs, outputs, 3, padding=1)
    conv.weight, conv.bias = weight.transpose(0, 2, 3, 1), mx.zeros((outputs,), dtype)
    return numpy(conv(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))
