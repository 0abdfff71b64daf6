"""Drawings as SVG, which a page or a document shows sharp at any size."""

from __future__ import annotations

import html

INK = "#222222"


def drawing(width: int, height: int, body: str) -> str:
    """Return an `<svg>` element on white. As a file, it is a whole drawing."""
    box = f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif"'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{paper}{body}</svg>'


def text(
    x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = INK, more: str = ""
) -> str:
    """Return a text element centred vertically on `y`. anchor: start, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}" dominant-baseline="middle" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}"{more}>{html.escape(words)}</text>'
