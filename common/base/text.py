"""Text for messages: it is short, and no character in it can move a terminal's cursor."""

from __future__ import annotations

import reprlib
import shlex
import unicodedata
from collections.abc import Mapping, Sequence

BITS = 1024  # a larger integer is not written out
LONGEST = 300  # characters of a refusal
_END = 100  # of them at its end, where it says what to do


def clean(text: object, limit: int = 200) -> str:
    """Return `text` as printable characters, at most `limit` of them, so that a file cannot write to the terminal.
    `text` is any object; no more than `limit` characters of it are formatted, so a long name, a deep list or a huge
    integer (which Python refuses to convert) costs no more."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in _start(text, limit + 1))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def short(text: str) -> str:
    """Return a refusal in at most LONGEST characters: a longer one keeps its start and its end."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - _END - 3]} … {text[-_END:]}"


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Turn {text: names with blanks between them} into {name: text}."""
    return {name: text for text, names in table.items() for name in names.split()}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line, its cells as wide as the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown_path(path: object, limit: int = 120) -> str:
    """Return `path` as one printable line of at most `limit` characters, which keeps the end of a long path."""
    shown = clean(path, 4096)
    return shown if len(shown) <= limit else "…" + shown[1 - limit :]


def shell_path(path: object) -> str:
    """Return `path` whole, as one printable word of a command that is copied into a shell."""
    return shlex.quote(clean(path, 4096))


def _start(value: object, count: int) -> str:
    """Return the first `count` characters of `value` as a text."""
    if isinstance(value, str):
        return value[:count]
    if isinstance(value, (list, tuple, dict, set, frozenset)) or (isinstance(value, int) and value.bit_length() > BITS):
        return _Start(count).repr(value)[:count]
    try:
        return str(value)[:count]
    except Exception:  # from an object that is not ours, or an error that holds such an integer
        return f"<{type(value).__name__}>"


class _Start(reprlib.Repr):
    """A `repr` that writes only about `count` characters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxtuple = self.maxlist = self.maxarray = self.maxdict = self.maxset = self.maxfrozenset = count
        self.maxstring = self.maxother = count

    def repr_int(self, x: int, level: int) -> str:
        """Write a large integer as its number of digits: Python converts at most 4,300 digits, in quadratic time."""
        digits = int(x.bit_length() * 0.30103) + 1
        return repr(x) if x.bit_length() <= BITS else f"<an integer of about {digits:,} digits>"


# Printing

_JOINERS = "\u200c\u200d"  # zero width (non-)joiner: Persian, Indic scripts and emoji need them


def printable(text: str) -> str:
    """Return `text` for a terminal, lines kept: control characters (ESC, NUL, tab, direction, ...) become escapes."""
    return "".join(c if _is_safe(c) else repr(c)[1:-1] for c in text)


def _is_safe(c: str) -> bool:
    # Cc Cf Cs Co Cn: control, format, surrogate, private, unassigned. Zl Zp: line breaks that are not "\n".
    return (
        c == "\n"
        or c in _JOINERS
        or (unicodedata.category(c)[0] != "C" and unicodedata.category(c) not in ("Zl", "Zp"))
    )
