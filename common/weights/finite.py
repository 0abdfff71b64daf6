"""Whether the weights of a plan are finite in the dtypes that they will be kept in, without keeping them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import TYPE_CHECKING

from qwenimg.common.codes.bits import finite
from qwenimg.common.formats.arrays import largest_bits, value
from qwenimg.common.formats.stored import TOO_LARGE, looked_at
from qwenimg.common.weights.not_finite import not_finite
from qwenimg.common.weights.plan import Entry, LoadPlan, read, read_codes
from qwenimg.common.weights.storage import Packed

if TYPE_CHECKING:
    import numpy as np


def check_values(plan: LoadPlan) -> None:
    """Reads one tensor after the other. Raises ModelError for the first that is not finite."""
    for entry in plan.entries.values():
        if isinstance(entry.storage, Packed):
            read_codes(entry)
        else:
            read_finite(entry)


def read_finite(entry: Entry) -> np.ndarray:
    """`read`, with every value finite in the dtype that it will be kept in. Raises ModelError."""
    if entry.source.is_plain and not entry.fused:
        values, largest = looked_at(entry.source.first)
        values = values.reshape(entry.shape)
    else:
        values = read(entry)
        largest = largest_bits(values)
    check_largest(entry, largest, lambda: int((~finite(values)).sum()))
    return values


def check_largest(entry: Entry, bits: int, count: Callable[[], int]) -> None:
    """Raises ModelError where the largest value of `entry`, of these bits (`largest_bits`), is not finite, `count`
    saying how many are not, or is infinite in the dtype that it will be kept in."""
    largest = value(bits, entry.dtype)
    if not isfinite(largest):
        raise not_finite(entry, count(), 0.0, entry.storage.dtype)
    if largest >= TOO_LARGE.get(entry.storage.dtype, inf):
        raise not_finite(entry, 0, largest, entry.storage.dtype)
