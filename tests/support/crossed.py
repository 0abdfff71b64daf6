"""Two lists of cases of which not every pair is needed in each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def crossed(cases: Iterable[Any], turns: Sequence[Any]) -> list[Any]:
    """All pairs. Each case with one of `turns`, these in turn; the pairs that are left are slow."""
    return [
        pytest.param(case, turn, marks=[] if i % len(turns) == j else [pytest.mark.slow])
        for i, case in enumerate(cases)
        for j, turn in enumerate(turns)
    ]
