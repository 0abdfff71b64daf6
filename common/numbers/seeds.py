"""The seeds of noise, as whole numbers. Read where numpy is not imported."""

from __future__ import annotations

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MAX_SEED = 2**64 - 1


def check_seed(seed: int) -> None:
    """Raise UsageError unless `seed` is a whole number in 0 .. 2**64 - 1."""
    if not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed {clean(seed, 40)} is not a whole number from 0 to {MAX_SEED}")
