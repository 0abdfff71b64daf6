"""A check that whole numbers among a block's arguments are valid indices: for any other a backend might read any
memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.parity.passport.passport import Argument, Recorded
from qwenimg.common.parity.sample import Drawn
from qwenimg.common.runtime.traced import Values


def are_inside(part: ComponentPolicy, recorded: Recorded) -> bool:
    """Return whether token ids are within the block's tables, and other indices within its arguments."""
    given: list[Any] = list(_flat(recorded.arguments))
    arrays = [one for one in given if isinstance(one, Drawn | Values)]
    shapes = [one.shape if isinstance(one, Drawn) else one.array.shape for one in arrays]
    entries = part.plan.under(recorded.path).entries
    tables = [entry.shape[0] for name, entry in entries.items() if name in part.network.tables]
    rows = max(tables or [shape[0] for shape in shapes if shape], default=1)
    longest = max((side for shape in shapes for side in shape), default=1)
    indices = [one.array for one in given if isinstance(one, Values) and one.dtype == "int64" and one.array.size]
    numbers = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
    placed = [bool(one.min() >= 0 and one.max() < rows) for one in indices]
    return all(placed) and (not tables or all(0 <= one < longest for one in numbers))


def _flat(arguments: Argument) -> Iterator[Argument]:
    if isinstance(arguments, tuple):
        for one in arguments:
            yield from _flat(one)
    else:
        yield arguments
