"""Single operations as the networks compute them, for measuring what a dtype is on this device, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx.ops.attention import attention
from qwenimg.backends.mlx.ops.device import numpy
from qwenimg.backends.mlx.ops.functions import DTYPES
from qwenimg.backends.mlx.ops.layers import Conv2d, Linear
from qwenimg.common.runtime.kernels import Kernel


def operate(operation: str, dtype: mx.Dtype, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Compute one operation, as `Engine.operate` describes it."""
    operands = [mx.array(array).astype(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = operands
        return numpy(attention(q, k, v))
    x, weight = operands
    outputs, inputs = weight.shape[:2]
    if operation == "matmul":
        linear = Linear(inputs, outputs)
        linear.weight, linear.bias = weight, mx.zeros((outputs,), dtype)
        return numpy(linear(x))
    conv = Conv2d(inputs, outputs, 3, padding=1)
    conv.weight, conv.bias = weight.transpose(0, 2, 3, 1), mx.zeros((outputs,), dtype)
    return numpy(conv(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))


def alone(kernel: Kernel) -> Callable[[], Array]:
    """What computes a product, convolution or attention of such shapes, of noise: zeros take a GPU less power."""
    dtype = DTYPES[kernel.dtype]

    def noise(*shape: int) -> Array:
        return mx.random.normal(shape).astype(dtype)

    layer: Conv2d | Linear
    if kernel.kind == "attention":
        q, k, v = (noise(B, L, H, D) for B, H, L, D in kernel.given[:3])
        mx.eval(q, k, v)
        return lambda: attention(q, k, v)
    if kernel.name == "Convolution":
        given, (outputs, side, _, inputs) = kernel.given[:2]
        layer = Conv2d(inputs, outputs, side, -(-given[1] // kernel.shape[1]), side // 2)
    else:
        given, (inputs, outputs) = kernel.given[0], kernel.given[1][-2:]
        layer = Linear(inputs, outputs)
    layer.weight, layer.bias = noise(*layer.weight.shape), noise(outputs)
    x = noise(*given)
    mx.eval(x, layer.weight, layer.bias)
    return lambda: layer(x)


def seconds(run: Callable[[], Array], count: int) -> float:
    """Of `count` runs, one behind the other."""
    begun = time.perf_counter()
    for _ in range(count):
        made = run()
        mx.async_eval(made)
    mx.eval(made)
    return time.perf_counter() - begun
