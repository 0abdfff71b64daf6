"""Transfer of arrays between numpy and the device, and the time at which they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


# Whether a function is traced for its gradients, so that nothing in it may be evaluated
_traced: ContextVar[bool] = ContextVar("traced", default=False)


@contextmanager
def traced() -> Iterator[None]:
    """Let nothing be evaluated while the context is open."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


def computes(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Wrap a component's method that runs its model: chains are compiled where its `fuses` says so."""

    @wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fusing(getattr(self, "fuses", None)):
            return method(self, *args, **kwargs)

    return run


def table(values: np.ndarray | Array, dtype: mx.Dtype) -> Array:
    """Return numbers as float32, whatever `dtype`: only torch has the float64 twin. They are made in numpy, or by
    another component in a training step."""
    if isinstance(values, np.ndarray):
        return mx.array(values.astype(np.float32))
    return values.astype(mx.float32)


def placed(values: np.ndarray | Sequence[Any]) -> Array:
    """Return indices or truth values on the device, in their own dtype."""
    return mx.array(values)


def writable(shape: Shape, dtype: str) -> tuple[Array, np.ndarray]:
    """Return memory that MLX owns and numpy writes, as an array for each. `dtype`: numpy's.

    MLX copies the array it is given. That one was never written to, and so takes none of the system's memory.
    """
    memory = mx.array(empty(shape, dtype))
    return memory, np.array(memory, copy=False)


def numpy(x: Array) -> np.ndarray:
    """Return x as a numpy array in float32, or in float64 if that is its dtype."""
    return np.array(at_least_float32(x))


def async_eval(x: Array) -> Array:
    """Start the computation of x without waiting, and return x. No graph then grows past one block: Metal's watchdog
    kills a very long command buffer."""
    if not _traced.get():
        mx.async_eval(x)
    return x


def eval(x: T) -> T:
    """Evaluate x, an array or arrays in tuples and lists, so that its inputs can be freed. Return x."""
    if not _traced.get():
        mx.eval(x)
    return x


def away(x: Array) -> Array:
    """Return a copy of x, which may be part of a larger array. Device and host share their memory."""
    return eval(mx.contiguous(x))


def contiguous(x: Array) -> Array:
    """Return x, copied if it is a part of a larger array, so that this can be freed."""
    return mx.contiguous(x)


def here(x: Array, like: Array) -> Array:
    """Return x: device and host share their memory."""
    return x
