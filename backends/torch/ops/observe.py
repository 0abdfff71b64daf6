"""What sees every operation: probes and traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Observer = Callable[[str, str, Tensor], None]
# Of a context: pipelines in two threads do not see each other's.
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Calls observer(operation, parameter path, result) after every operation of this context, in the order in which
    observers came."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def seen(operation: str, path: str, result: Tensor) -> Tensor:
    for observer in _observers.get():
        observer(operation, path, result)
    return result
