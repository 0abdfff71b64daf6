"""A sheet of pictures in rows, with lines of text under each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.pictures.pixels import Uint8

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

MARGIN, LINE, MARK = 6, 12, 3  # pixels
GREEN, RED, INK = (30, 160, 60), (220, 30, 35), (40, 40, 40)


@dataclass(frozen=True, kw_only=True)
class SheetTile:
    """An image, uint8 [H, W, 3], the lines under it, and its mark: right, wrong, or (None) no mark."""

    pixels: Uint8
    lines: tuple[str, ...]
    right: bool | None = None


def sheet(
    tiles: Sequence[SheetTile], columns: int, side: int = 128, font: FreeTypeFont | None = None, line: int = LINE
) -> Uint8:
    """Return the tiles in rows, each image `side` pixels wide, as uint8 [H, W, 3]. `font`: else Pillow's own.
    line: the height of a line of text."""
    from PIL import Image, ImageDraw, ImageFont

    font = font or ImageFont.load_default()  # type: ignore[assignment]
    written = [_wrapped(one.lines, side, font) for one in tiles]
    text = line * max(len(lines) for lines in written) + MARGIN
    tall = max(round(side * one.pixels.shape[0] / one.pixels.shape[1]) for one in tiles)
    across, down = side + 2 * MARGIN, tall + 2 * MARGIN + text
    rows = -(-len(tiles) // columns)
    page = Image.new("RGB", (columns * across, rows * down), "white")
    pen = ImageDraw.Draw(page)
    for i, (one, lines) in enumerate(zip(tiles, written, strict=True)):
        left, top = i % columns * across + MARGIN, i // columns * down + MARGIN
        picture = scaled(one.pixels, side)
        if one.right is not None:
            edge = (left - MARK, top - MARK, left + picture.width + MARK - 1, top + picture.height + MARK - 1)
            pen.rectangle(edge, fill=GREEN if one.right else RED)
        page.paste(picture, (left, top))
        for j, words in enumerate(lines):
            pen.text((left, top + tall + MARK + 1 + j * line), words, fill=INK, font=font)
    return np.asarray(page)


def scaled(pixels: Uint8, side: int) -> Image:
    """Return a picture as Pillow's, `side` pixels wide."""
    from PIL import Image

    picture = Image.fromarray(pixels)
    if picture.width == side:
        return picture
    return picture.resize((side, round(side * picture.height / picture.width)), Image.Resampling.LANCZOS)


def _wrapped(lines: Iterable[str], side: int, font: object) -> list[str]:
    """Wrap `lines` at spaces and after Chinese characters to the width `side`, except for longer words."""
    wrapped: list[str] = []
    for line in lines:
        wrapped.append("")
        for word in re.findall(r"[\u3000-\u9fff\uff00-\uffef]\s*|[^\s\u3000-\u9fff\uff00-\uffef]+\s*", line):
            longer = wrapped[-1] + word
            if wrapped[-1] and font.getlength(longer.rstrip()) > side:  # type: ignore[attr-defined]
                wrapped.append(word)
            else:
                wrapped[-1] = longer
    return [line.rstrip() for line in wrapped]
