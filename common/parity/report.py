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
from qwenimg.common.pictures import html_page, svg

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


def page(report: BlockReport) -> str:
    """Return the report as a page of HTML."""
    about = (
        "Errors are relative to float64 on the same arguments and weights, in units of the roundoff of the dtype "
        "that a block computes in; of a residual block, of its update. Colour: the share of what is allowed. "
        "In brackets the ratio to the first backend of the same precision."
    )
    head = ["precision", "backend", "device", "versions", "blocks", "most of what is allowed", "in", "verdict"]
    rows = [_about(column) for column in report.columns]
    title = f"Parity of {clean(report.model, 60)}"
    return html_page.page(title, html_page.paragraph(about), html_page.table(head, rows), picture(report))


def _about(column: Column) -> list[str]:
    worst, side = column.worst, column.side
    versions = ", ".join(f"{clean(name, 16)} {clean(version, 24)}" for name, version in side.versions.items())
    failed = counted(len(column.failed), "block")
    verdict = f"{failed} over the limit" if column.failed else "all within limits" if column.cells else "no float64"
    share, name = ("-", "-") if worst is None else (f"{worst[1].share:.2f}", worst[0])
    tf32 = " (TF32 is on)" if side.tf32 else ""
    device = f"{side.device}{tf32}"
    return [column.precision, side.backend, device, versions, str(len(column.cells)), share, name, verdict]


# The heat map
LINE, COLUMN, LABEL, MARGIN = 16, 128, 380, 16  # pixels


def picture(report: BlockReport) -> str:
    """Return the heat map as SVG: blocks down, precisions and backends across."""
    names, top = report.names, MARGIN + 6 * LINE
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
            cell, ratio = column.cells.get(name), report.ratio(i, name)
            text, colour = ("-", UNKNOWN) if cell is None else (cell.text, cell.colour)
            text += "" if ratio is None else f" ({ratio:.2f})"
            marks.append(_rectangle(text, colour, x, top + j * LINE, COLUMN - 2, "" if cell is None else cell.failure))
    width = 2 * MARGIN + LABEL + COLUMN * max(len(report.columns), 3)
    return svg.drawing(width, top + LINE * len(names) + MARGIN, "\n".join(marks))


def _rectangle(text: str, colour: tuple[int, int, int], x: int, y: int, width: int, failure: str = "") -> str:
    """Return a cell. A `failure` is shown where the pointer is."""
    red, green, blue = colour
    ink = "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else svg.INK
    title = f"<title>{escape(clean(failure, 160))}</title>" if failure else ""
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{LINE - 2}" fill="rgb{colour}">{title}</rect>'
    return box + svg.text(x + 4, y + 7, text, colour=ink)
