"""The numbers of model calls that reuse blocks of an earlier call, as text: `3-5,7`."""

from __future__ import annotations

from collections.abc import Iterable

from qwenimg.common.base.amounts import parse_ranges
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

NONE = "none"


def parse(text: str) -> frozenset[int]:
    """Return the numbers of `text`, from 1. Raises UsageError."""
    if text == NONE:
        return frozenset()
    numbers = parse_ranges(text)
    if numbers is None or numbers[0] == 0:
        raise UsageError(f"cached-calls is {clean(text, 60)!r}; expected numbers of calls, as 3-5,7, or {NONE}")
    return frozenset(numbers)


def text(calls: Iterable[int]) -> str:
    """Return the text of `calls`, the inverse of `parse`."""
    ranges: list[list[int]] = []
    for call in sorted(calls):
        if ranges and ranges[-1][1] == call - 1:
            ranges[-1][1] = call
        else:
            ranges.append([call, call])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges) or NONE
