"""Conversions of which nobody is told anything."""

from __future__ import annotations


class Silent:
    """A listener that keeps nothing."""

    def report(self, kind: str, text: str) -> None: ...

    def plan(self, size: int, files: int) -> None: ...

    def kept(self, name: str, size: int) -> None: ...

    def written(self, name: str, size: int) -> None: ...
