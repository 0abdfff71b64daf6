"""K of the law error = K u sqrt(n), as it was measured of each kind of block: `constants.json`, which
`python tools/measure_constants.py` writes.

In float32 the limit is MARGIN times that, and never below what `parity.LIMIT` says for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import read_json
from qwenimg.common.parity.parity import LIMIT, MARGIN


def path() -> Path:
    return Path(__file__).with_name("constants.json")


@cache
def document() -> Mapping[str, Any]:
    return read_json(path())


def recorded(kind: str, dtype: str) -> float | None:
    """The larger K of the backends that were measured, for blocks of this `kind`: `NETWORK.BLOCK`."""
    found: Mapping[str, Any] = document()["k"].get(kind, {})
    return float(found[dtype]) if dtype in found else None


def limit(kind: str, dtype: str) -> float:
    """K that passes. In 16 bit it is the same for all: what blocks have beyond is the rounding of their stream, which
    is allowed beside it."""
    return max(LIMIT[dtype], MARGIN * (recorded(kind, dtype) or 0.0)) if dtype == "float32" else LIMIT[dtype]
