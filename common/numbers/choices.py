"""Choices by a seed: the same on every machine, and different for neighbouring seeds as long as they can be."""

from __future__ import annotations

import hashlib
import math

_SHARES = 1 << 53


class SeededChoices:
    """Choices that follow from a seed, one after another. `name` tells apart several uses of one seed.

    The seed is written in a mixed base, with a digit for each choice: so n seeds in a row choose every one of n, and as
    many seeds as there are combinations give every combination once. A stride near the golden section, and a shift by
    the hash of the choices before, hide the order. Whole numbers and SHA-256 alone: nothing is rounded.
    """

    def __init__(self, seed: int, name: str = "") -> None:
        self._seed, self._rest, self._shares = seed, seed, 0
        self._before = hashlib.sha256(name.encode()).digest()

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` - 1."""
        if count == 1:
            return 0
        self._rest, digit = divmod(self._rest, count)
        chosen = (digit * _stride(count) + int.from_bytes(self._before[:8], "big")) % count
        self._before = hashlib.sha256(self._before + chosen.to_bytes(8, "big")).digest()
        return chosen

    def share(self) -> float:
        """Return a number from 0 to below 1, which takes no digit."""
        self._shares += 1
        text = f"{self._seed} {self._shares} ".encode() + self._before
        return (int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % _SHARES) / _SHARES

    def several(self, count: int, wanted: int) -> list[int]:
        """Return `wanted` different numbers from 0 to `count` - 1, in the order in which they were chosen."""
        moved: dict[int, int] = {}  # of a shuffled list of all numbers, those that are not at their place
        chosen: list[int] = []
        for last in range(count - 1, count - 1 - wanted, -1):
            place = self.below(last + 1)
            chosen.append(moved.get(place, place))
            moved[place] = moved.pop(last, last)
        return chosen


def _stride(count: int) -> int:
    """Return a number without a factor in common with `count`, near its golden section."""
    stride = max(1, count * 618_034 // 1_000_000)
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride
