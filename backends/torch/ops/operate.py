"""Single operations as the networks compute them, to measure how exact a dtype is on this device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qwenimg.backends.torch.ops.attention import attention
from qwenimg.backends.torch.ops.device import numpy
from qwenimg.backends.torch.ops.layers import Conv2d, Linear


def operate(operation: str, dtype: torch.dtype, arrays: Sequence[np.ndarray], device: torch.device) -> np.ndarray:
    """Compute one operation, as `Engine.operate` describes it."""
    operands = [torch.from_numpy(array).to(device).to(dtype) for array in arrays]
    if operation == "attention":
        q, k, v = operands
        return numpy(attention(q, k, v))
    x, weight = operands
    outputs, inputs = weight.shape[:2]
    with torch.device("meta"):  # without first values, whose random numbers are the user's
        layer = Linear(inputs, outputs) if operation == "matmul" else Conv2d(inputs, outputs, 3, padding=1)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(weight.new_zeros(outputs), requires_grad=False)
    return numpy(layer(x))
