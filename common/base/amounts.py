"""Counts and numbers of bytes as text."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """`1 step`, `2 steps`, `1,000 tensors`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def size_text(count: float) -> str:
    """`count` bytes in decimal units: 57.7 GB, 120.0 MB, 3.0 kB, 12 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return counted(int(count), "byte")
