"""Chains of elementwise operations as one kernel each, by MLX's compiler: which functions are such chains, and when.

On a GPU they are compiled unless that is asked not to be, at next to no cost. On a CPU each kernel would call the
system's compiler, so there only on request.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import TypeVar

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx import kernel_files

T = TypeVar("T")

# Of a context: what was asked for; None is what the device suggests.
_asked: ContextVar[bool | None] = ContextVar("fusing", default=None)
# What is called in the place of a chain that would be compiled, for counting kernels.
Counting = Callable[[Callable[..., Array], Sequence[Array]], Array]
_counting: ContextVar[Counting | None] = ContextVar("counting", default=None)


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def fusing(asked: bool | None) -> AbstractContextManager[None]:
    """Within it chains are compiled, are not, or (None) as the device suggests."""
    if asked and not on_gpu():
        kernel_files.ensure()
    return _within(_asked, asked)


def counting(chain: Counting | None) -> AbstractContextManager[None]:
    """Within it `chain` is called where a chain would be compiled; None: nothing is in its place."""
    return _within(_counting, chain)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def fused(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` as one kernel where that is wanted. Shapes are those of each call."""
    compiled = cache(lambda: mx.compile(function))

    @wraps(function)
    def call(*arguments: Array) -> Array:
        asked = _asked.get()
        wanted = on_gpu() and "MLX_DISABLE_COMPILE" not in os.environ if asked is None else asked
        if wanted and (counted := _counting.get()) is not None:
            return counted(function, arguments)
        return compiled()(*arguments) if wanted else function(*arguments)

    return call


def missing() -> str:
    """What is missing for compiling here."""
    if on_gpu() or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return ""
    return "needs a C++ compiler on this machine (g++ or clang++)"
