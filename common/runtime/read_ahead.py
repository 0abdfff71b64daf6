"""What is next is read by a thread while what is before it is used: the same for both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`read` is called in the thread, with one number at a time."""

    def __init__(self, read: Callable[[int], T]):
        self._read = read
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._next: tuple[int, Future[T]] | None = None

    def start(self, number: int) -> None:
        """Begins to read it."""
        self._next = (number, self._thread.submit(self._read, number))

    def take(self, number: int) -> T:
        """It, once it is read. Raises what reading raised."""
        found, self._next = self._next, None
        return found[1].result() if found is not None and found[0] == number else self._read(number)


def cycle(numbers: Iterable[int]) -> dict[int, int]:
    """Of each number the next larger one, and of the last the first."""
    order = sorted(numbers)
    return dict(zip(order, [*order[1:], *order[:1]], strict=True))
