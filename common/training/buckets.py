"""The sizes at which pictures are learnt: of about one area, in the pictures' proportions, in whole units, and no
larger than the pictures themselves."""

from __future__ import annotations

import math
from itertools import product

from qwenimg.common.base.errors import UsageError

UNIT, SMALL_UNIT, SMALL = 32, 16, 256
"""The multiple of sides in pixels: the smaller one for sizes of up to SMALL."""


def unit(side: int) -> int:
    """Return the multiple of sides for pictures of `side` x `side`."""
    return SMALL_UNIT if side <= SMALL else UNIT


def bucket(size: tuple[int, int], side: int, *, enlarge: bool = False) -> tuple[int, int]:
    """Return the size, of at most about side x side pixels, at which a picture of `size` is learnt.

    Of the sizes in whole units around the exact one it is that nearest to the proportions, then to the area. Without
    `enlarge` no side is larger than the picture's. Raises UsageError for a picture that has not two units a side."""
    step, (width, height) = unit(side), size
    least = 2 * step
    if not enlarge and min(size) < least:
        raise UsageError(f"is {width}x{height}, less than {least} a side; make it larger, or give --enlarge")
    area = side * side if enlarge else min(side * side, width * height)
    wide, high = math.sqrt(area * width / height), math.sqrt(area * height / width)

    def near(exact: float, most: int) -> list[int]:
        below = max(least, int(exact) // step * step)
        return [one for one in (below, below + step) if enlarge or one <= most] or [least]

    def distance(one: tuple[int, int]) -> tuple[float, float]:
        return abs(math.log(one[0] * height / (one[1] * width))), abs(math.log(one[0] * one[1] / area))

    allowed = [one for one in product(near(wide, width), near(high, height)) if one[0] * one[1] <= area * 1.1]
    return min(allowed or [(near(wide, width)[0], near(high, height)[0])], key=distance)
