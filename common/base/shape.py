"""The shape of a tensor, and a table of them by name."""

from __future__ import annotations

Shape = tuple[int, ...]
Manifest = dict[str, Shape]
