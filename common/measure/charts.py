"""A chart of lines over named places on a logarithmic axis, drawn as SVG and, with Pillow, as PNG.

Both are made of the same few marks: lines, dots and texts. A plotting library would be 100 MB.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 960, 420  # of one chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 132
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by all eyes
INK, FAINT = "#222222", "#d8d8d8"
MOST_LETTERS = 24  # of a place's name
MOST_NAMES = 44  # of places along the axis
FONT = 12


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    values: Sequence[float | None]  # of each place; None leaves a gap


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    places: Sequence[str]
    series: Sequence[Series]
    limit: tuple[float, str] | None = None  # a line across, and what it is

    def decades(self) -> tuple[int, int]:
        """Powers of ten around all values."""
        found = [v for one in self.series for v in one.values if v]
        found += [self.limit[0]] if self.limit and found else []
        if not found:
            return 0, 1
        low, high = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
        return low, max(high, low + 1)


@dataclass(frozen=True)
class Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class Text:
    x: float
    y: float  # of its middle
    text: str
    anchor: str = "start"  # start, middle or end
    steep: bool = False  # written upwards, ending at (x, y)
    size: int = FONT
    colour: str = INK


Mark = Line | Dot | Text


def marks(chart: Chart) -> Iterator[Mark]:
    """What a chart is drawn of, from the back to the front."""
    low, high = chart.decades()
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = (right - LEFT) / max(1, len(chart.places) - 1)

    def height(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - TOP)

    yield Text(LEFT, 20, chart.title, size=FONT + 3)
    every = max(1, math.ceil((high - low) / 8))
    for power in range(low, high + 1, every):
        yield Line(((LEFT, height(10.0**power)), (right, height(10.0**power))), FAINT)
        yield Text(LEFT - 8, height(10.0**power), f"1e{power}", "end")
    skipped = max(1, math.ceil(len(chart.places) / MOST_NAMES))
    for i, place in enumerate(chart.places[::skipped]):
        short = place if len(place) <= MOST_LETTERS else f"..{place[-MOST_LETTERS:]}"
        yield Text(LEFT + i * skipped * step, bottom + 8, short, "end", steep=True, size=FONT - 2)
    if chart.limit:
        at = height(chart.limit[0])
        yield Line(((LEFT, at), (right, at)), INK, 1.5, dashed=True)
        yield Text(LEFT + 6, at + 9, chart.limit[1])
    for i, one in enumerate(chart.series):
        colour = COLOURS[i % len(COLOURS)]
        points = [(LEFT + k * step, height(v)) for k, v in enumerate(one.values) if v]
        runs = _unbroken([LEFT + k * step if v else None for k, v in enumerate(one.values)], points)
        yield from (Line(run, colour, 2.0) for run in runs if len(run) > 1)
        yield from (Dot(x, y, colour) for x, y in points)
        yield Dot(right + 14, TOP + 18 * i + 2, colour)
        yield Text(right + 24, TOP + 18 * i + 2, one.name)


def _unbroken(
    xs: Sequence[float | None], points: Sequence[tuple[float, float]]
) -> list[tuple[tuple[float, float], ...]]:
    """The points in runs without a gap between."""
    found: list[list[tuple[float, float]]] = [[]]
    left = iter(points)
    for x in xs:
        if x is None:
            found.append([])
        else:
            found[-1].append(next(left))
    return [tuple(run) for run in found]


def svg(chart: Chart) -> str:
    """One `<svg>` element, to be put into a page."""
    body = "".join(_svg(mark) for mark in marks(chart))
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="sans-serif">{body}</svg>'


def _svg(mark: Mark) -> str:
    if isinstance(mark, Line):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
        dash = ' stroke-dasharray="6 4"' if mark.dashed else ""
        return f'<polyline points="{path}" fill="none" stroke="{mark.colour}" stroke-width="{mark.width}"{dash}/>'
    if isinstance(mark, Dot):
        return f'<circle cx="{mark.x:.1f}" cy="{mark.y:.1f}" r="3" fill="{mark.colour}"/>'
    turn = f' transform="rotate(-60 {mark.x:.1f} {mark.y:.1f})"' if mark.steep else ""
    place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" dominant-baseline="middle" text-anchor="{mark.anchor}"'
    return f'<text {place} font-size="{mark.size}" fill="{mark.colour}"{turn}>{html.escape(mark.text)}</text>'


def png(charts: Sequence[Chart], scale: int = 2) -> bytes:
    """All charts, one below the other, on white."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (WIDTH * scale, HEIGHT * scale * len(charts)), "white")
    for i, chart in enumerate(charts):
        part = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "white")
        draw = ImageDraw.Draw(part)
        for mark in marks(chart):
            _paint(part, draw, mark, scale)
        sheet.paste(part, (0, HEIGHT * scale * i))
    file = io.BytesIO()
    sheet.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _paint(image: Any, draw: Any, mark: Mark, scale: int) -> None:
    if isinstance(mark, Line):
        points = [(x * scale, y * scale) for x, y in mark.points]
        for one in _dashes(points, scale) if mark.dashed else [points]:
            draw.line(one, fill=mark.colour, width=round(mark.width * scale))
    elif isinstance(mark, Dot):
        x, y, r = mark.x * scale, mark.y * scale, 3 * scale
        draw.ellipse((x - r, y - r, x + r, y + r), fill=mark.colour)
    elif mark.steep:
        _paint_steep(image, mark, scale)
    else:
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[mark.anchor]
        draw.text((mark.x * scale, mark.y * scale), mark.text, mark.colour, _font(mark, scale), anchor)


def _dashes(points: Sequence[tuple[float, float]], scale: int) -> list[list[tuple[float, float]]]:
    """Of a level line."""
    (start, y), (end, _) = points
    step = 10 * scale
    return [
        [(start + i * step, y), (min(start + i * step + 6 * scale, end), y)]
        for i in range(int((end - start) / step) + 1)
    ]


def _paint_steep(image: Any, mark: Text, scale: int) -> None:
    """Written to a sheet of its own, which is turned so that the end of the text stays where it is."""
    from PIL import Image, ImageDraw

    font = _font(mark, scale)
    side = 2 * (math.ceil(font.getlength(mark.text)) + 4 * scale)
    sheet = Image.new("L", (side, side), 0)
    ImageDraw.Draw(sheet).text((side / 2, side / 2), mark.text, 255, font, "rm")
    turned = sheet.rotate(60, Image.Resampling.BICUBIC)
    image.paste(mark.colour, (round(mark.x * scale - side / 2), round(mark.y * scale - side / 2)), turned)


def _font(mark: Text, scale: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(mark.size * scale)
