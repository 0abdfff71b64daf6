"""Text for messages: nothing in it can move a terminal's cursor, and it is never long."""

from __future__ import annotations

import unicodedata

from qwenimg.common.base.errors import _start


def short(text: object, limit: int) -> str:
    """`clean(text, limit)`."""
    return clean(text, limit)


def clean(text: object, limit: int = 200) -> str:
    """`text` in printable characters only and at most `limit` long, so that a file cannot write to the terminal.

    Any object, at the cost of `limit` characters: a name of megabytes, a list of millions or lists in lists are not
    written out, nor is an integer of thousands of digits, which Python refuses to."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in _start(text, limit + 1))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


# Printing

_JOINERS = "\u200c\u200d"  # zero width (non-)joiner: Persian, Indic scripts and emoji need them


def printable(text: str) -> str:
    """`text` for a terminal, lines kept: control characters (ESC, NUL, tab, direction, ...) become escapes."""
    return "".join(c if _is_safe(c) else repr(c)[1:-1] for c in text)


def _is_safe(c: str) -> bool:
    # Cc Cf Cs Co Cn: control, format, surrogate, private, unassigned. Zl Zp: line breaks that are not "\n".
    return (
        c == "\n"
        or c in _JOINERS
        or (unicodedata.category(c)[0] != "C" and unicodedata.category(c) not in ("Zl", "Zp"))
    )
