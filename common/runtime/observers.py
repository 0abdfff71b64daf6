"""Observers of every operation of the networks, for probes and traces: the same for both backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from qwenimg.common.runtime.engine import Observer

Array = TypeVar("Array")
# By context, so that pipelines in two threads do not see each other's.
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call observer(operation, parameter path, result) after every operation of this context, in the order in which
    observers were added."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def observed() -> bool:
    """Return whether there is an observer in this context."""
    return bool(_observers.get())


def seen(operation: str, path: str, result: Array) -> Array:
    """Report `result` to every observer and return it."""
    if observed():
        for observer in _observers.get():
            observer(operation, path, result)
    return result
