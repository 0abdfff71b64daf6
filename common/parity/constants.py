"""K of the law error = K u sqrt(n), as measured for each kind of block: `constants.json`, which `python
tools/measure_constants.py` writes.

In float32 the limit is MARGIN times K, and never below `parity.LIMIT`.
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
    """Return the largest K of the measured backends for blocks of this `kind`, `NETWORK.BLOCK`, or None."""
    by_dtype: Mapping[str, Any] = document()["k"].get(kind, {})
    return float(by_dtype[dtype]) if dtype in by_dtype else None


def limit(kind: str, dtype: str) -> float:
    """Return the largest K that passes. In 16 bit it is the same for all: any more error of a block is the rounding of
    its stream, which is allowed in addition."""
    return max(LIMIT[dtype], MARGIN * (recorded(kind, dtype) or 0.0)) if dtype == "float32" else LIMIT[dtype]
