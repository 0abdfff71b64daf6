"""What sees every operation: probes and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx.core import array as Array

_observers: list[Callable[[str, str, Array], None]] = []


@contextmanager
def observe(observer: Callable[[str, str, Array], None]) -> Iterator[None]:
    """Calls observer(operation, parameter path, result) after every operation below, for probes and traces."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def seen(operation: str, path: str, result: Array) -> Array:
    for observer in _observers:
        observer(operation, path, result)
    return result
