"""Checks that the weights of a plan are finite in the dtypes of their storage, without keeping them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isfinite
from typing import TYPE_CHECKING

from qwenimg.common.codes.bits import finite
from qwenimg.common.formats.arrays import largest_bits, value
from qwenimg.common.formats.stored import TOO_LARGE, read_checked
from qwenimg.common.weights.not_finite import not_finite
from qwenimg.common.weights.plan import Entry, LoadPlan, read, read_codes
from qwenimg.common.weights.storage import Packed

if TYPE_CHECKING:
    import numpy as np


def check_values(plan: LoadPlan) -> None:
    """Read one tensor after the other. Raises ModelError for the first that is not finite."""
    for entry in plan.entries.values():
        if isinstance(entry.storage, Packed):
            read_codes(entry)
        else:
            read_finite(entry)


def read_finite(entry: Entry) -> np.ndarray:
    """Return `read(entry)` if every value is finite in the dtype of its storage. Raises ModelError."""
    if entry.source.is_plain and not entry.fused:
        values, largest = read_checked(entry.source.first)
        values = values.reshape(entry.shape)
    else:
        values = read(entry)
        largest = largest_bits(values)
    check_largest(entry, largest, lambda: int((~finite(values)).sum()))
    return values


def check_largest(entry: Entry, bits: int, count: Callable[[], int]) -> None:
    """Check that the largest value of `entry`, with these bits (`largest_bits`), is finite, also in the dtype of its
    storage.

    `count` returns the number of values that are not finite. Raises ModelError.
    """
    largest = value(bits, entry.dtype)
    if not isfinite(largest):
        raise not_finite(entry, count(), 0.0, entry.storage.dtype)
    if largest >= TOO_LARGE.get(entry.storage.dtype, inf):
        raise not_finite(entry, 0, largest, entry.storage.dtype)
