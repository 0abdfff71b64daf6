"""Tables in the documentation, written by commands: the lines between two markers are replaced; long tables are CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA = DOCS / "results"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_data(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table that is too long for a page: docs/results/NAME.csv, without Markdown's backquotes."""
    with (DATA / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([[cell.replace("`", "") for cell in row] for row in (heads, *rows)])


def read_data(name: str) -> list[dict[str, str]]:
    """Read docs/results/NAME.csv: each row by the heads."""
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(page: str, name: str, text: str) -> None:
    """Puts `text` between `<!-- begin NAME -->` and `<!-- end NAME -->` of docs/PAGE."""
    path = DOCS / page
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    old = path.read_text(encoding="utf-8")
    new, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"{path}: {count} places between {begin} and {end}, expected 1")
    path.write_text(new, encoding="utf-8")
