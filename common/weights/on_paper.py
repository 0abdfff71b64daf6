"""A plan of weights without files, from shapes alone: for the memory that they would take."""

from __future__ import annotations

from contextlib import closing
from math import prod
from pathlib import Path

from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.formats.stored import DTYPES, TensorSlice
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.weights.plan import Entry, LoadPlan, ParamUses, Source
from qwenimg.common.weights.storage import Dense


def plan(component: str, uses: ParamUses, dtype: str = "bfloat16") -> LoadPlan:
    """Return the plan of a component that is published in `dtype`. Nothing can be read from it."""
    stored, size = next(name for name, known in DTYPES.items() if known == dtype), BYTES[dtype]
    with closing(open_regular(Path(__file__))) as placeholder:
        entries = {
            name: Entry(
                name=name,
                shape=use.shape,
                source=Source((TensorSlice(name, placeholder, stored, use.shape, 0, size * prod(use.shape)),)),
                storage=Dense(dtype),
                residency=use.residency,
            )
            for name, use in uses.items()
        }
    return LoadPlan(component=component, entries=entries, files=())
