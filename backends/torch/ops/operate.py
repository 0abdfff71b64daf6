"""Single operations as the networks compute them, for measuring what a dtype is on this device, and what they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch.ops.attention import attention
from qwenimg.backends.torch.ops.cpu import laid_out
from qwenimg.backends.torch.ops.device import numpy
from qwenimg.backends.torch.ops.functions import DTYPES
from qwenimg.backends.torch.ops.layers import Conv2d, Linear
from qwenimg.common.runtime.kernels import Kernel


def operate(operation: str, dtype: torch.dtype, arrays: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """Compute one operation, as `Engine.operate` describes it."""
    operands = [torch.from_numpy(array).to(device).to(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = operands
        return numpy(attention(q, k, v))
    x, weight = operands
    outputs, inputs = weight.shape[:2]
    layer = Linear(inputs, outputs) if operation == "matmul" else Conv2d(inputs, outputs, 3, padding=1)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(weight.new_zeros(outputs), requires_grad=False)
    return numpy(layer(x))


def alone(kernel: Kernel, device: torch.device) -> Callable[[], Tensor]:
    """What computes a product, convolution or attention of such shapes, of noise: zeros take a card less power."""
    dtype = DTYPES[kernel.dtype]

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    if kernel.kind == "attention":
        q, k, v = (noise(B, L, H, D) for B, H, L, D in kernel.given[:3])
        return lambda: attention(q, k, v)
    layer: Conv2d | Linear
    if kernel.name == "convolution":
        given, (outputs, inputs, side, _) = kernel.given[:2]
        layer = Conv2d(inputs, outputs, side, -(-given[2] // kernel.shape[2]), side // 2)
    else:
        given, (inputs, outputs) = kernel.given[-2], kernel.given[-1][-2:]
        layer = Linear(inputs, outputs)
    weight = laid_out(noise(*layer.weight.shape), device.type)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(noise(outputs), requires_grad=False)
    x = noise(*given)
    return lambda: layer(x)


def seconds(run: Callable[[], Tensor], count: int) -> float:
    """Of `count` runs, one behind the other."""
    begun = time.perf_counter()
    for _ in range(count):
        made = run()
    made.flatten()[0].item()
    return time.perf_counter() - begun
