"""The numbers of the layers that skip-layer guidance leaves out, as text: `7-9` or `7,8,9`. They count from 0."""

from __future__ import annotations

from qwenimg.common.base.amounts import parse_ranges
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MOST = 999


def parse(text: str) -> tuple[int, ...]:
    """Return the layer numbers in `text`, in order; an empty text has none. Raises UsageError."""
    numbers = parse_ranges(text) if text else ()
    if numbers is None or (numbers and numbers[-1] > MOST):
        raise UsageError(f"skip-layers is {clean(text, 60)!r}; expected numbers of layers from 0, as 7-9 or 7,8,9")
    return numbers


def check(text: str, count: int, caches: bool) -> None:
    """Check `text` for a model of `count` layers; `caches`: with a step cache. Raises UsageError."""
    layers = parse(text)
    if layers and layers[-1] >= count:
        raise UsageError(f"skip-layers is {clean(text, 60)!r}: this model has the layers 0 to {count - 1}")
    if layers and layers[0] == 0 and caches:
        raise UsageError("skip-layers has layer 0, by which a step cache decides: leave it in, or give no --step-cache")
