"""A page of HTML with everything in it: no script, font or image from another place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from qwenimg.common.base.text import clean

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } tr { border-bottom: 1px solid #ddd }
td, th { padding: 2px 12px 2px 0; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } .marked { color: #b00020; font-weight: bold }
svg { width: 100%; height: auto }"""


def page(title: str, *parts: str) -> str:
    """Return the page of this title with `parts`, which are HTML."""
    title = escape(title)
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>'
    return "\n".join(
        ["<!doctype html>", f'<html lang="en">{head}<body>', f"<h1>{title}</h1>", *parts, "</body></html>", ""]
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], marked: Callable[[str], bool] = lambda text: False
) -> str:
    """Return a table. `marked`: whether a cell of this text is to be seen at once."""
    cells = [[_cell("td", text, " class='marked'" if marked(text) else "") for text in row] for row in rows]
    lines = [f"<tr>{''.join(row)}</tr>" for row in [[_cell("th", text) for text in head], *cells]]
    return "\n".join(["<table>", *lines, "</table>"])


def _cell(tag: str, text: str, more: str = "") -> str:
    return f"<{tag}{more}>{escape(clean(text, 100))}</{tag}>"
