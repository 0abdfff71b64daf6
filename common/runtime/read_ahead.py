"""What is next is read by a thread while what is before it is used: the same for both backends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`read` is called in the thread, with one path at a time."""

    def __init__(self, read: Callable[[str], T]):
        self._read = read
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[str, Future[T]] | None = None

    def start(self, path: str) -> None:
        """Begins to read it."""
        self._next = (path, self._thread.submit(self._read, path))

    def has(self, path: str) -> bool:
        """Whether it is what is read, or was."""
        return self._next is not None and self._next[0] == path

    def take(self, path: str) -> T:
        """It, once it is read: behind what is still being read, where that is another one. Raises what reading
        raised."""
        if not self.has(path):
            self.start(path)
        assert self._next is not None
        (_, found), self._next = self._next, None
        return found.result()


class Order:
    """In which blocks are called, learned from the pass before."""

    def __init__(self) -> None:
        self._after: dict[str, str] = {}
        self._last = ""

    def next(self, path: str) -> str | None:
        """Notes that `path` is called, and says what was called after it the last time."""
        self._after[self._last], self._last = path, path
        return self._after.get(path)
