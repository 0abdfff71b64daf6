"""Reading by a thread ahead of use: the same for both backends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """A thread that calls `read` for one path at a time."""

    def __init__(self, read: Callable[[str], T]):
        self._read = read
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[str, Future[T]] | None = None

    def start(self, path: str) -> None:
        """Start to read `path`."""
        self._next = (path, self._thread.submit(self._read, path))

    def has(self, path: str) -> bool:
        """Return whether `path` is the current or the last file read."""
        return self._next is not None and self._next[0] == path

    def take(self, path: str) -> T:
        """Return the result for `path`, once it is read, after any other path that is still being read. Raises the
        errors of `read`."""
        if not self.has(path):
            self.start(path)
        assert self._next is not None
        (_, result), self._next = self._next, None
        return result.result()


class Order:
    """The order in which blocks are called, learned from the last pass."""

    def __init__(self) -> None:
        self._after: dict[str, str] = {}
        self._last = ""

    def next(self, path: str) -> str | None:
        """Note that `path` is called, and return the path that followed it the last time, or None."""
        self._after[self._last], self._last = path, path
        return self._after.get(path)
