"""Threads that compute at once, each with cores of its own.

A small model's operations take a millisecond each, and to split every one of them over the cores costs more than it
gains: all wait for the slowest, thousands of times in a step. So each thread takes a part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """A pool of `count` threads whose torch operations use `cores` each, whatever other threads set later."""

    def __init__(self, count: int, cores: int):
        self.count = count
        self._pool = ThreadPoolExecutor(count)
        ready = Barrier(count)
        for started in [self._pool.submit(_start, cores, ready) for _ in range(count)]:
            started.result()

    def submit(self, function: Callable[[T], R], value: T) -> Future[R]:
        return self._pool.submit(function, value)

    def map(self, function: Callable[[T], R], values: Iterable[T]) -> Iterator[R]:
        """Return the results in the order of `values`."""
        return self._pool.map(function, values)

    def stop(self) -> None:
        """Stop the threads without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _start(cores: int, ready: Barrier) -> None:
    """Set the cores of a thread; each thread runs this exactly once."""
    ready.wait()
    torch.set_num_threads(cores)
    torch.get_num_threads()  # the first call in a thread fixes the number, which would else follow the main thread's
