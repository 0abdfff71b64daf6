"""Compilation of chains of elementwise operations to one kernel each, by MLX's compiler: which functions are such
chains, and when.

On a GPU they are compiled by default, at next to no cost. On a CPU each kernel would call the system's compiler, so
there only on request.
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

# Whether chains are compiled in this context; None: as suits the device
_fuses: ContextVar[bool | None] = ContextVar("fusing", default=None)
# The function called in place of a chain that would be compiled, for counting kernels
Counting = Callable[[Callable[..., Array], Sequence[Array]], Array]
_counting: ContextVar[Counting | None] = ContextVar("counting", default=None)


def on_gpu() -> bool:
    return mx.default_device().type == mx.DeviceType.gpu


def compiles() -> bool:
    """Return whether chains are compiled where nobody chose."""
    return on_gpu() and "MLX_DISABLE_COMPILE" not in os.environ


def fusing(wanted: bool | None) -> AbstractContextManager[None]:
    """Compile chains while the context is open if `wanted`, do not if False, or (None) do as suits the device."""
    if wanted and not on_gpu():
        kernel_files.ensure()
    return _within(_fuses, wanted)


def counting(chain: Counting | None) -> AbstractContextManager[None]:
    """Call `chain` while the context is open where a chain would be compiled; None: compile chains again."""
    return _within(_counting, chain)


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def fused(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return `function` as one kernel where compiling is wanted; each call may have other shapes."""
    compiled = cache(lambda: mx.compile(function))

    @wraps(function)
    def call(*arguments: Array) -> Array:
        setting = _fuses.get()
        wanted = compiles() if setting is None else setting
        if wanted and (counted := _counting.get()) is not None:
            return counted(function, arguments)
        return compiled()(*arguments) if wanted else function(*arguments)

    return call


def missing() -> str:
    """Return what compiling needs and does not find here, or nothing."""
    if on_gpu() or any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return ""
    return "needs a C++ compiler on this machine (g++ or clang++)"
