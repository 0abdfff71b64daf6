"""Tables in the documentation, written by commands: the lines between two markers are replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
