"""Memory that weights are read to, and the look at every value."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.base.shape import Shape

Item = TypeVar("Item")
Fetched = TypeVar("Fetched")

THREADS = 2  # that read ahead: of so many tensors more than one is in memory beside those that are in their place
WORTH_A_THREAD = 1 << 20  # bytes: handing less to a thread and back takes longer than reading it
_LARGE = 1 << 22  # bytes: from here on numpy asks the system for huge pages
_IN_CACHE = 1 << 18  # bytes that are looked at in one go
# Of the bits of a number those without its sign, as an integer of its size. They are in the order of the numbers' size,
# infinity above all numbers and what is none above infinity.
_UNSIGNED = {"f4": ("<u4", 0x7FFFFFFF), "f2": ("<u2", 0x7FFF), "u2": ("<u2", 0x7FFF)}


def empty(shape: Shape, dtype: str) -> np.ndarray:
    """As numpy.empty, but large ones are not on huge pages: looking for those took four times as long as reading."""
    import mmap

    import numpy as np

    size = prod(shape) * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)


def largest_bits(array: np.ndarray) -> int:
    """Of float32, float16 or bfloat16 (its bits, uint16) the bits of the largest absolute value; no value gives 0."""
    kind, mask = _UNSIGNED[array.dtype.str[1:]]
    bits = array.reshape(-1).view(kind)
    step = _IN_CACHE // bits.itemsize
    return max((int((bits[i : i + step] & mask).max()) for i in range(0, bits.size, step)), default=0)


def value(bits: int, dtype: str) -> float:
    """The number of these bits: not finite where one of those that were looked at was not."""
    import numpy as np

    if dtype == "bfloat16":
        bits, dtype = bits << 16, "float32"
    return float(np.array(bits, np.uint32 if dtype == "float32" else np.uint16).view(dtype))


def ahead(
    items: Iterable[Item], fetch: Callable[[Item], Fetched], size: Callable[[Item], int]
) -> Iterator[tuple[Item, Fetched]]:
    """Each item with what `fetch` returns for it: threads fetch the next ones while this one is used. `size`: bytes of
    an item; small ones are fetched together. Raises what `fetch` raises."""
    from concurrent.futures import Future, ThreadPoolExecutor

    def fetch_all(batch: list[Item]) -> list[Fetched]:
        return [fetch(item) for item in batch]

    with ThreadPoolExecutor(THREADS) as pool:
        coming: deque[tuple[list[Item], Future[list[Fetched]]]] = deque()
        try:
            for batch in _batches(items, size):
                coming.append((batch, pool.submit(fetch_all, batch)))
                if len(coming) > THREADS:
                    first, found = coming.popleft()
                    yield from zip(first, found.result(), strict=True)
            while coming:
                first, found = coming.popleft()
                yield from zip(first, found.result(), strict=True)
        finally:
            for _, left in coming:
                left.cancel()


def _batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in their order, so many at a time that handing them to a thread and back takes little beside them."""
    batch, bytes_of_it = [], 0
    for item in items:
        batch.append(item)
        bytes_of_it += size(item)
        if bytes_of_it >= WORTH_A_THREAD:
            yield batch
            batch, bytes_of_it = [], 0
    if batch:
        yield batch
