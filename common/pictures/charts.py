"""A chart of lines over named places on a logarithmic axis, as SVG. A plotting library would be 100 MB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from qwenimg.common.pictures.svg import INK, drawing, text

WIDTH, HEIGHT = 960, 420  # pixels of one chart
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 44, 132
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # distinct also for the colour-blind
FAINT = "#d8d8d8"
MOST_LETTERS = 24  # letters of a place's name
MOST_NAMES = 44  # names of places along the axis
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    name: str
    values: Sequence[float | None]  # one for each place; None leaves a gap


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    places: Sequence[str]
    series: Sequence[Series]
    limit: tuple[float, str] | None = None  # the height of a line across, and its label

    def decades(self) -> tuple[int, int]:
        """Return the powers of ten around all values."""
        values = [v for one in self.series for v in one.values if v]
        values += [self.limit[0]] if self.limit and values else []
        if not values:
            return 0, 1
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return low, max(high, low + 1)


def svg(*charts: Chart) -> str:
    """Return one `<svg>` element with the charts one below the other."""
    marks = ("".join(_marks(chart)) for chart in charts)
    body = "".join(f'<g transform="translate(0 {i * HEIGHT})">{one}</g>' for i, one in enumerate(marks))
    return drawing(WIDTH, HEIGHT * len(charts), body)


def _marks(chart: Chart) -> Iterator[str]:
    """Yield the elements of a chart, from the back to the front."""
    low, high = chart.decades()
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    step = (right - LEFT) / max(1, len(chart.places) - 1)

    def height(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - TOP)

    yield text(LEFT, 20, chart.title, size=15)
    for power in range(low, high + 1, max(1, math.ceil((high - low) / 8))):
        yield _line([(LEFT, height(10.0**power)), (right, height(10.0**power))], FAINT)
        yield text(LEFT - 8, height(10.0**power), f"1e{power}", anchor="end")
    skipped = max(1, math.ceil(len(chart.places) / MOST_NAMES))
    for i, place in enumerate(chart.places[::skipped]):
        short = place if len(place) <= MOST_LETTERS else f"..{place[-MOST_LETTERS:]}"
        x, y = LEFT + i * skipped * step, bottom + 8
        yield text(x, y, short, anchor="end", size=10, more=f' transform="rotate(-60 {x:.1f} {y:.1f})"')
    if chart.limit:
        at = height(chart.limit[0])
        yield _line([(LEFT, at), (right, at)], INK, ' stroke-dasharray="6 4"')
        yield text(LEFT + 6, at + 9, chart.limit[1])
    for i, one in enumerate(chart.series):
        colour = COLOURS[i % len(COLOURS)]
        points = [(LEFT + k * step, height(v)) if v else None for k, v in enumerate(one.values)]
        for run in ([p for p in run if p] for there, run in groupby(points, bool) if there):  # without a gap
            yield _line(run, colour, ' stroke-width="2"')
            yield from (_dot(x, y, colour) for x, y in run)
        yield _dot(right + 14, TOP + 18 * i + 2, colour)
        yield text(right + 24, TOP + 18 * i + 2, one.name)


def _line(points: Sequence[Point], colour: str, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}"{more}/>'


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
