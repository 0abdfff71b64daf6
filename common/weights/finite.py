"""Whether the weights of a plan are finite in the dtypes that they will be kept in, without keeping them."""

from __future__ import annotations

from qwenimg.common.weights.bits import widened
from qwenimg.common.weights.plan import TOO_LARGE, Entry, LoadPlan, not_finite, read, read_codes
from qwenimg.common.weights.storage import Packed


def check_values(plan: LoadPlan) -> None:
    """Reads one tensor after the other. Raises ModelError for the first that is not finite."""
    for entry in plan.entries.values():
        if isinstance(entry.storage, Packed):
            read_codes(entry)
        else:
            _check(entry)


def _check(entry: Entry) -> None:
    import numpy as np

    values = widened(read(entry))
    largest = float(max(-values.min(initial=0), values.max(initial=0)))  # NaN where there is one
    if not np.isfinite(largest):
        raise not_finite(entry, int(np.count_nonzero(~np.isfinite(values))), 0.0, entry.storage.dtype)
    if largest >= TOO_LARGE.get(entry.storage.dtype, float("inf")):
        raise not_finite(entry, 0, largest, entry.storage.dtype)
