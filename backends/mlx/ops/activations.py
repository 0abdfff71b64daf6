"""Activations that are straight on both sides of zero."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn
from mlx.core import array as Array

from qwenimg.common.runtime.observers import seen


def leaky_relu(x: Array, slope: float) -> Array:
    """Return x where it is positive, else `slope` times x."""
    return mx.maximum(x, slope * x)


def relu(x: Array) -> Array:
    """Return x where it is positive, else 0."""
    return mx.maximum(x, 0)


class ReLU(mlx.nn.Module):
    def __call__(self, x: Array) -> Array:
        """Return x where it is positive, else 0."""
        return relu(x)


class PReLU(mlx.nn.Module):
    path = ""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = mx.zeros((channels,))

    def __call__(self, x: Array) -> Array:
        """Return x where it is positive, else x times its channel's weight, in x's dtype."""
        return seen("prelu", self.path, mx.where(x > 0, x, x * self.weight.astype(x.dtype)))
