"""A plan of weights that are nowhere, by their shapes alone: what they would take in memory."""

from __future__ import annotations

from contextlib import closing
from math import prod
from pathlib import Path

from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.weights.plan import Entry, LoadPlan, Piece, Source, Uses
from qwenimg.common.weights.storage import Dense


def plan(component: str, uses: Uses) -> LoadPlan:
    """Of a component that is published in bfloat16. Nothing can be read of it."""
    with closing(open_regular(Path(__file__))) as nothing:
        entries = {
            name: Entry(
                name=name,
                shape=use.shape,
                source=Source((Piece(name, nothing, "BF16", use.shape, 0, 2 * prod(use.shape)),)),
                storage=Dense("bfloat16"),
                residency=use.residency,
            )
            for name, use in uses.items()
        }
    return LoadPlan(component=component, entries=entries, files=())
