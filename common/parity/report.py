"""Passports side by side: blocks by precisions and backends, as a self-contained page of HTML and as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.parity.passport.passport import Figure, Passport, Side
from qwenimg.common.pictures import svg

FAINT = 1 / 16  # share of the limit up to which a cell has the lightest colour
PALE, DEEP, FAILED, UNKNOWN = (242, 247, 251), (32, 96, 145), (193, 18, 31), (230, 230, 230)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One block on one side: the result that uses most of its limit."""

    error: float
    allowed: float
    failure: str

    @property
    def share(self) -> float:
        return self.error / self.allowed if self.allowed > 0 else math.nan

    @property
    def text(self) -> str:
        return f"{self.error:.2f} of {self.allowed:.1f}"

    @property
    def colour(self) -> tuple[int, int, int]:
        """The colour, from pale to deep by the logarithm of the share, red for a failure."""
        if self.failure:
            return FAILED
        if math.isnan(self.share):
            return UNKNOWN
        t = min(max(1 - math.log(max(self.share, FAINT)) / math.log(FAINT), 0.0), 1.0)
        red, green, blue = (round(p + t * (d - p)) for p, d in zip(PALE, DEEP, strict=True))
        return red, green, blue


SHARES = (0.06, 0.12, 0.25, 0.5, 1.0)
KEY = [
    *((f"{share:.2g}", Cell(error=share, allowed=1.0, failure="").colour) for share in SHARES),
    ("falls short", FAILED),
    ("no float64", UNKNOWN),
]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One side of one passport."""

    precision: str
    side: Side
    cells: dict[str, Cell]  # by the block's name
    created: str  # the passport's date, for the page

    @property
    def title(self) -> str:
        return f"{clean(self.precision, 24)} {clean(self.side.backend, 8)}"

    @property
    def failed(self) -> list[str]:
        return [name for name, cell in self.cells.items() if cell.failure]

    @property
    def worst(self) -> tuple[str, Cell] | None:
        known = {name: cell for name, cell in self.cells.items() if not math.isnan(cell.share)}
        return max(known.items(), key=lambda item: item[1].share, default=None)


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    model: str
    names: list[str]  # the names of all blocks, in order
    columns: list[Column]

    def ratio(self, column: int, name: str) -> float | None:
        """Return the error over that in the first column of the same precision; None for the first itself."""
        this = self.columns[column]
        first = next(other for other in self.columns if other.precision == this.precision)
        if first is this or name not in this.cells or name not in first.cells or not first.cells[name].error:
            return None
        return this.cells[name].error / first.cells[name].error


def gathered(passports: Sequence[Passport]) -> BlockReport:
    """Return the report of all passports. Raises UsageError for passports of different models."""
    first = passports[0]
    for other in passports[1:]:
        if other.model.shapes != first.model.shapes:
            one, two = clean(first.model.name, 60), clean(other.model.name, 60)
            raise UsageError(f"these passports are of two models: {one} and {two}; report each alone")
    columns = [
        Column(
            precision=one.precision + (f" -q {one.model.quantize}" if one.model.quantize else ""),
            side=side,
            cells=_cells(one, side),
            created=one.created,
        )
        for one in passports
        for side in one.sides
    ]
    names = list(dict.fromkeys(block.name for one in passports for block in one.blocks))
    return BlockReport(model=first.model.name, names=names, columns=columns)


def _cells(passport: Passport, side: Side) -> dict[str, Cell]:
    cells = {}
    for block, figures in zip(passport.blocks, side.figures, strict=False):
        if figures:
            worst = max(figures, key=_used)
            failure = next((figure.failures[0] for figure in figures if figure.failures), "")
            cells[block.name] = Cell(error=worst.error, allowed=worst.allowed, failure=failure)
    return cells


def _used(figure: Figure) -> float:
    return figure.error / figure.allowed if figure.error == figure.error and figure.allowed > 0 else math.inf


# The page

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: 2px 8px; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th { font-weight: 600; border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
.ratio { color: #666 } .key td { text-align: center; padding: 2px 14px }
"""


def page(report: BlockReport) -> str:
    """Return the report as HTML without a script, an image or a link."""
    title = f"Parity of {escape(clean(report.model, 60))}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>',
        f"<h1>{title}</h1>",
        "<p>Errors are relative to float64 on the same arguments and weights, in units of the roundoff of the dtype "
        "that a block computes in; of a residual block, of its update. Colour: the share of what is allowed. "
        "A ratio is to the first backend of the same precision.</p>",
        _sides(report),
        '<table class="key"><tr>' + "".join(_painted(text, colour) for text, colour in KEY) + "</tr></table>",
        _map(report),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _sides(report: BlockReport) -> str:
    rows = ["precision", "backend", "device", "versions", "blocks", "most of what is allowed", "in", "verdict"]
    lines = [_row("th", rows)]
    for column in report.columns:
        worst, side = column.worst, column.side
        versions = ", ".join(f"{clean(name, 16)} {clean(version, 24)}" for name, version in side.versions.items())
        failed = counted(len(column.failed), "block")
        verdict = f"{failed} over the limit" if column.failed else "all within limits" if column.cells else "no float64"
        share, name = ("-", "-") if worst is None else (f"{worst[1].share:.2f}", worst[0])
        tf32 = " (TF32 is on)" if side.tf32 else ""
        cells = [column.precision, side.backend, f"{side.device}{tf32}", versions, str(len(column.cells)), share, name]
        lines.append(_row("td", [*cells, verdict]))
    return _table(lines)


def _map(report: BlockReport) -> str:
    ratios = [any(report.ratio(i, name) is not None for name in report.names) for i, _ in enumerate(report.columns)]
    head = ["block"]
    for column, compared in zip(report.columns, ratios, strict=True):
        head += [column.title, "ratio"] if compared else [column.title]
    lines = [_row("th", head)]
    for name in report.names:
        cells = [f"<td>{escape(clean(name, 100))}</td>"]
        for i, (column, compared) in enumerate(zip(report.columns, ratios, strict=True)):
            cell = column.cells.get(name)
            text = "-" if cell is None else f"{cell.error:.2f}"
            about = "" if cell is None else f"at most {cell.allowed:.2f} u. {cell.failure}"
            cells.append(_painted(text, UNKNOWN if cell is None else cell.colour, about))
            if compared:
                ratio = report.ratio(i, name)
                cells.append(f'<td class="ratio">{"-" if ratio is None else f"{ratio:.2f}"}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return _table(lines)


def _painted(text: str, colour: tuple[int, int, int], about: str = "") -> str:
    style = f"background: {_rgb(colour)}; color: {_ink(colour)}"
    return f'<td style="{style}" title="{escape(clean(about, 160))}">{escape(text)}</td>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(clean(cell, 100))}</{tag}>' for cell in cells)}</tr>"


def _table(lines: Sequence[str]) -> str:
    return "\n".join(["<table>", *lines, "</table>"])


def _rgb(colour: tuple[int, int, int]) -> str:
    return f"rgb({', '.join(map(str, colour))})"


def _ink(colour: tuple[int, int, int]) -> str:
    red, green, blue = colour
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else svg.INK


# The heat map
LINE, COLUMN, LABEL, MARGIN = 16, 128, 380, 16  # pixels
MOST = 1000  # blocks that are shown


def picture(report: BlockReport) -> str:
    """Return the heat map as SVG: blocks down, precisions and backends across."""
    names, top = report.names[:MOST], MARGIN + 6 * LINE
    title = (
        f"Parity of {clean(report.model, 60)}: error against float64, in roundoffs; colour: share of what is allowed"
    )
    marks = [svg.text(MARGIN, MARGIN, title)]
    marks += [_rectangle(text, colour, MARGIN + 80 * i, MARGIN + LINE, 78) for i, (text, colour) in enumerate(KEY)]
    marks += [svg.text(MARGIN, top + j * LINE + 8, clean(name, 60)) for j, name in enumerate(names)]
    for i, column in enumerate(report.columns):
        x = MARGIN + LABEL + i * COLUMN
        marks += [
            svg.text(x + 4, top - 2 * LINE + 8, clean(column.precision, 18)),
            svg.text(x + 4, top - LINE + 8, clean(column.side.backend, 18)),
        ]
        for j, name in enumerate(names):
            cell = column.cells.get(name)
            text, colour = ("-", UNKNOWN) if cell is None else (cell.text, cell.colour)
            marks.append(_rectangle(text, colour, x, top + j * LINE, COLUMN - 2))
    width = 2 * MARGIN + LABEL + COLUMN * max(len(report.columns), 3)
    return svg.drawing(width, top + LINE * len(names) + MARGIN, "\n".join(marks))


def _rectangle(text: str, colour: tuple[int, int, int], x: int, y: int, width: int) -> str:
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{LINE - 2}" fill="{_rgb(colour)}"/>'
    return box + svg.text(x + 4, y + 7, text, colour=_ink(colour))
