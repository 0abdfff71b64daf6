"""Tables that keep the latest entries."""

from __future__ import annotations

from typing import Any


def drop_oldest(table: dict[Any, Any], most: int) -> None:
    """Remove the first entries of `table` until `most` are left."""
    while len(table) > most:
        del table[next(iter(table))]
