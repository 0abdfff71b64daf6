"""The borders by which a picture is extended, and the text of `--outpaint`: `left=200,top=100`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.sizes import MAX_SIDE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIDES = ("left", "right", "top", "bottom")
_ONE = re.compile(r"\s*(left|right|top|bottom)\s*=\s*([0-9]{1,9})\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Border:
    """The pixels by which one side of a picture is moved outwards."""

    side: str
    pixels: int

    def __str__(self) -> str:
        """Return the text that `parse` reads back as this border."""
        return f"{self.side}={self.pixels}"


def parse(value: object, files: bool = True) -> tuple[Border, ...]:
    """Return the borders of a text, `left=200,top=100`, of a table, or of a list of texts, in the order of SIDES.
    Raises UsageError."""
    if isinstance(value, dict):
        value = [f"{side}={pixels}" for side, pixels in value.items()]
    texts = value if isinstance(value, (list, tuple)) else (value,)
    found: dict[str, int] = {}
    for part in (part for one in texts for part in re.split("[,;]", str(one)) if part.strip()):
        match = _ONE.fullmatch(part)
        if match is None:
            form = "write left=200,top=100 in pixels, with left, right, top and bottom"
            raise UsageError(f"outpaint {clean(part, 40)!r}: {form}")
        side, pixels = match[1].lower(), int(match[2])
        if side in found:
            raise UsageError(f"outpaint names {side} twice; give each side once")
        if pixels > MAX_SIDE:
            raise UsageError(f"outpaint {side}={pixels} is too much; choose 0 to {MAX_SIDE} pixels")
        found[side] = pixels
    borders = tuple(Border(side, found[side]) for side in SIDES if found.get(side))
    if found and not borders:
        raise UsageError("outpaint extends no side; give one more than 0 pixels, such as left=200")
    return borders


def pixels(borders: Sequence[Border]) -> tuple[int, int, int, int]:
    """Return the pixels at the left, right, top and bottom."""
    left, right, top, bottom = (sum(one.pixels for one in borders if one.side == side) for side in SIDES)
    return left, right, top, bottom


def extended(rows: int, columns: int, borders: Sequence[Border]) -> tuple[int, int]:
    """Return rows and columns of a picture with `borders`. Raises UsageError for more than a picture can have."""
    left, right, top, bottom = pixels(borders)
    rows, columns = rows + top + bottom, columns + left + right
    if max(rows, columns) > MAX_SIDE:
        raise UsageError(f"outpaint makes the picture {columns}x{rows}; at most {MAX_SIDE} pixels a side are drawn")
    return rows, columns


def sides(options: Mapping[str, Any], images: Sequence[NDArray[np.uint8]]) -> dict[str, int]:
    """Return width and height of the canvas for the first of `images`, so that nothing is scaled; nothing if `options`
    have a side, or no borders. Raises UsageError."""
    given = any(options.get(side) is not None for side in ("width", "height"))
    if given or not images or not options.get("outpaint"):
        return {}
    rows, columns = images[0].shape[:2]
    rows, columns = extended(rows, columns, options["outpaint"])
    return {"width": columns, "height": rows}
