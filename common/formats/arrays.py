"""Memory that weights are read into, and the check of every value."""

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

THREADS = 2  # threads that read ahead; so many tensors wait in memory beside those in their place
WORTH_A_THREAD = 1 << 20  # bytes: handing less to a thread and back takes longer than reading it
_LARGE = 1 << 22  # bytes: from here on numpy asks the system for huge pages
_IN_CACHE = 1 << 18  # bytes that are checked at once
# The bits of a number without its sign, as an integer. They are in the order of the absolute values: infinity above all
# numbers, NaN above infinity.
_UNSIGNED = {"f4": ("<u4", 0x7FFFFFFF), "f2": ("<u2", 0x7FFF), "u2": ("<u2", 0x7FFF)}


def empty(shape: Shape, dtype: str) -> np.ndarray:
    """Return memory like numpy.empty, but without huge pages for large arrays: looking for those took four times as
    long as reading."""
    import mmap

    import numpy as np

    size = prod(shape) * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)


def largest_bits(array: np.ndarray) -> int:
    """Return the bits of the largest absolute value in float32, float16 or bfloat16 (its bits, uint16); 0 for an
    empty array."""
    kind, mask = _UNSIGNED[array.dtype.str[1:]]
    bits = array.reshape(-1).view(kind)
    step = _IN_CACHE // bits.itemsize
    return max((int((bits[i : i + step] & mask).max()) for i in range(0, bits.size, step)), default=0)


def value(bits: int, dtype: str) -> float:
    """Return the number with these bits: not finite if one of the checked values was not."""
    import numpy as np

    if dtype == "bfloat16":
        bits, dtype = bits << 16, "float32"
    return float(np.array(bits, np.uint32 if dtype == "float32" else np.uint16).view(dtype))


def ahead(
    items: Iterable[Item], fetch: Callable[[Item], Fetched], size: Callable[[Item], int]
) -> Iterator[tuple[Item, Fetched]]:
    """Yield each item with the result of `fetch` for it; threads fetch the next ones meanwhile.

    `size` returns the bytes of an item; small items are fetched together. Raises what `fetch` raises.
    """
    from concurrent.futures import Future, ThreadPoolExecutor

    def fetch_all(batch: list[Item]) -> list[Fetched]:
        return [fetch(item) for item in batch]

    with ThreadPoolExecutor(THREADS) as pool:
        coming: deque[tuple[list[Item], Future[list[Fetched]]]] = deque()
        try:
            for batch in _batches(items, size):
                coming.append((batch, pool.submit(fetch_all, batch)))
                if len(coming) > THREADS:
                    first, results = coming.popleft()
                    yield from zip(first, results.result(), strict=True)
            while coming:
                first, results = coming.popleft()
                yield from zip(first, results.result(), strict=True)
        finally:
            for _, unused in coming:
                unused.cancel()


def _batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield the items in their order, in batches so large that handing them to a thread and back costs little."""
    batch, bytes_of_it = [], 0
    for item in items:
        batch.append(item)
        bytes_of_it += size(item)
        if bytes_of_it >= WORTH_A_THREAD:
            yield batch
            batch, bytes_of_it = [], 0
    if batch:
        yield batch
