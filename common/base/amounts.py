"""Counts and numbers of bytes as text."""

from __future__ import annotations

import re

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MOST = 2**60  # bytes: more than any machine has
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `1 step`, `2 steps`, `1,000 tensors`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def size_text(count: float) -> str:
    """Return `count` bytes in decimal units: 57.7 GB, 120.0 MB, 3.0 kB, 12 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return counted(int(count), "byte")


def parse_bytes(text: str, option: str) -> int:
    """Return the number of bytes that `24GB`, `24g`, `1.5 GiB` or `800MB` stands for. `option`: the option that has
    this value, for the message. Raises UsageError."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]i?)b?\s*", text.lower())
    count = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if not 1 <= count <= MOST:
        raise UsageError(f"{option} {clean(text, 40)!r}: give an amount such as 24GB")
    return count


def parse_max(text: str | int | None) -> int | None:
    """Return --max-memory in bytes, or None if it was not given. Raises UsageError."""
    if isinstance(text, str):
        return parse_bytes(text, "--max-memory")
    if text is not None and (isinstance(text, bool) or not isinstance(text, int) or not 1 <= text <= MOST):
        raise UsageError(f"max_memory is {clean(text, 40)}; give a number of bytes, or an amount such as '12GB'")
    return text


def duration(seconds: float) -> str:
    """Return `roughly 20 s`: one unit, and one digit, or two below 20, since no more is known. Below 2 s: `1.3 s`, `230
    ms`."""
    if seconds < 2:
        amount, unit = (seconds, "s") if seconds >= 1 else (max(0.1, 1000 * seconds), "ms")
        return f"roughly {float(f'{amount:.2g}'):g} {unit}"
    unit, length = next(((u, n) for u, n in (("days", 86400), ("h", 3600), ("min", 60)) if seconds >= 2 * n), ("s", 1))
    amount = seconds / length
    return f"roughly {float(f'{amount:.2g}' if amount < 20 else f'{amount:.1g}'):.0f} {unit}"


# Numbers and ranges

_RANGE = re.compile(r"\s*([0-9]{1,4})\s*(?:-\s*([0-9]{1,4})\s*)?", re.ASCII)


def parse_ranges(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a text such as `3-5,7` in order, each once and at most 9,999; None if it is no such list.

    A range costs the same whatever its length: a text of 20,000 times `1-9999` is read in milliseconds."""
    bits = 0
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if first > last:
            return None
        bits |= (1 << last + 1) - (1 << first)
    return tuple(number for number, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
