"""The heat map of a report as a PNG: blocks down, precisions and backends across."""

from __future__ import annotations

import io
from typing import TypeAlias

from PIL import Image, ImageDraw, ImageFont

from qwenimg.common.base.text import clean
from qwenimg.common.parity.report import FAILED, UNKNOWN, BlockReport, Cell

ROW, COLUMN, LABEL, MARGIN, TEXT = 16, 128, 380, 16, 12  # pixels
INK, PAPER = (34, 34, 34), (255, 255, 255)
MOST = 1000  # rows that are drawn
COLOURS = 256  # of the file, spread so that the rare ones are among them
Font: TypeAlias = "ImageFont.FreeTypeFont | ImageFont.ImageFont"


def png(report: BlockReport) -> bytes:
    names = report.names[:MOST]
    top = MARGIN + 5 * ROW
    width = 2 * MARGIN + LABEL + COLUMN * max(len(report.columns), 5)
    image = Image.new("RGB", (width, top + ROW * len(names) + MARGIN), PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(TEXT)
    title = (
        f"Parity of {clean(report.model, 60)}: error against float64, in roundoffs; colour: share of what is allowed"
    )
    draw.text((MARGIN, MARGIN), title, INK, font)
    _key(draw, font)
    for i, column in enumerate(report.columns):
        x = MARGIN + LABEL + i * COLUMN
        draw.text((x + 4, top - 2 * ROW), clean(column.precision, 18), INK, font)
        draw.text((x + 4, top - ROW), clean(column.side.backend, 18), INK, font)
    for j, name in enumerate(names):
        y = top + j * ROW
        draw.text((MARGIN, y + 1), clean(name, 60), INK, font)
        for i, column in enumerate(report.columns):
            _cell(draw, font, column.cells.get(name), MARGIN + LABEL + i * COLUMN, y)
    out = io.BytesIO()
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _cell(
    draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, cell: Cell | None, x: int, y: int
) -> None:
    colour = UNKNOWN if cell is None else cell.colour
    draw.rectangle((x, y, x + COLUMN - 2, y + ROW - 2), fill=colour)
    text = "-" if cell is None else f"{cell.error:.2f} of {cell.allowed:.1f}"
    red, green, blue = colour
    ink = PAPER if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else INK
    draw.text((x + 4, y + 1), text, ink, font)


def _key(draw: ImageDraw.ImageDraw, font: Font) -> None:
    """What the colours mean."""
    shares = (0.06, 0.12, 0.25, 0.5, 1.0)
    cells = [(f"{share:.2g}", Cell(error=share, allowed=1.0, failure="").colour) for share in shares]
    for i, (text, colour) in enumerate([*cells, ("short", FAILED), ("none", UNKNOWN)]):
        x, y = MARGIN + 50 * i, MARGIN + int(1.5 * ROW)
        draw.rectangle((x, y, x + 48, y + ROW), fill=colour)
        ink = PAPER if sum(colour) < 420 else INK
        draw.text((x + 6, y + 1), text, ink, font)
