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

# Times LIMIT in 16 bit. Roundings inside a block grow with what a prompt makes of it, which the gain of its arguments
# does not show: of 26 prompts one made a text layer of the built-in model take 1.5 times LIMIT, on both backends. No
# fault is lost by it: the block is held to float32's limit as well, and to the recording machine's error.
OWN_INPUTS = 2.0


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
    """Return the largest K that passes for a block of a model. In 16 bits it is the same for all kinds of blocks: the
    rounding of their stream is allowed separately."""
    if dtype != "float32":
        return OWN_INPUTS * LIMIT[dtype]
    return max(LIMIT[dtype], MARGIN * (recorded(kind, dtype) or 0.0))
