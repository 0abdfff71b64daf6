"""What crosses between numpy and the device, and when it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlx.core as mx
import numpy as np
from mlx.core import array as Array

from qwenimg.backends.mlx.compile import fusing
from qwenimg.backends.mlx.ops.functions import at_least_float32
from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.arrays import empty

T = TypeVar("T")
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


def computes(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method of a component that runs its model: with chains compiled where its `fuses` says so."""

    @wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fusing(getattr(self, "fuses", None)):
            return method(self, *args, **kwargs)

    return run


def table(values: np.ndarray, dtype: mx.Dtype) -> Array:
    """Numbers that were made in numpy, as float32 whatever `dtype`: float64 is the torch twin's alone."""
    return mx.array(values.astype(np.float32))


def placed(values: np.ndarray | Sequence[Any]) -> Array:
    """Indices or truth values, as they are."""
    return mx.array(values)


def writable(shape: Shape, dtype: str) -> tuple[Array, np.ndarray]:
    """Memory that MLX has and numpy writes, as what it is for both. `dtype`: numpy's.

    MLX copies what it is given; what is given here was never written to, and so takes none of the system's memory."""
    memory = mx.array(empty(shape, dtype))
    return memory, np.array(memory, copy=False)


def numpy(x: Array) -> np.ndarray:
    """float32, or float64 where that is what it is."""
    return np.array(at_least_float32(x))


def async_eval(x: Array) -> Array:
    """Hands what led to x to the device without waiting, so that no graph grows past one block: a very long command
    buffer is killed by Metal's watchdog."""
    mx.async_eval(x)
    return x


def eval(x: T) -> T:
    """Evaluates x, an array or some in tuples and lists, so that what led to it can be freed."""
    mx.eval(x)
    return x


def away(x: Array) -> Array:
    """A copy of x, which may be a part of a larger array: device and host share their memory."""
    return eval(mx.contiguous(x))


def here(x: Array, like: Array) -> Array:
    """Nothing here, as above."""
    return x
