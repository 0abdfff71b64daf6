"""Holds what a backend made of a recorded block against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.parity import constants, parity
from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.parity.passport import Figure, Kept, Recorded
from qwenimg.common.parity.sample import Drawn, projected
from qwenimg.common.runtime.traced import Values


def figures(
    part: ComponentPolicy, recorded: Recorded, made: Sequence[Values] | None = None, *, wide: bool = False
) -> tuple[Figure, ...]:
    """Of each result of a block; of those `made` now, or of the recording backend. Empty without float64. wide: they
    were made in float32, whatever the policy."""
    block = part.block(recorded.block, recorded.path)
    assert block is not None, recorded.name
    if any(kept.exact is None for kept in recorded.results):
        return ()
    found = []
    for i, kept in enumerate(recorded.results):
        kind = f"{part.component.network}.{recorded.block}"
        dtype = "float32" if wide else part.dtype(block, recorded.path, returned(recorded))
        case = parity.Case(
            component=kind,
            dtype=dtype,
            returned="float32" if wide else kept.dtype,
            blocks=part.updates(block, recorded.path),
            k=constants.limit(kind, dtype) * kept.gain,
        )
        output = _output(kept, None if made is None else made[i])
        stream = _stream(recorded, kept, i) if i < block.streams else None
        assert kept.exact is not None
        verdict = parity.judge(case, kept.exact, output, stream)
        error = verdict.figures.relative / case.unit
        failures = (*(f"reference: {why}" for why in verdict.reference_faults), *verdict.failures)
        found.append(Figure(error=error, allowed=verdict.allowed / case.unit, failures=failures))
    return tuple(found)


def returned(recorded: Recorded) -> list[str]:
    """The dtypes of a block's results."""
    return [kept.dtype for kept in recorded.results]


def _output(kept: Kept, made: Values | None) -> parity.Output:
    if made is None:
        return parity.Output(values=kept.values, dtype=kept.dtype)
    array: NDArray[Any] = made.array
    if kept.seed is not None and array.shape == kept.shape:
        array = projected(array.astype(np.float64), kept.seed)
    return parity.Output(values=array, dtype=made.dtype)


def _stream(recorded: Recorded, kept: Kept, place: int) -> NDArray[Any] | None:
    """The argument that the result is an update of: where there is a shortcut of another width, none is."""
    stream = recorded.arguments[place]
    array = stream.values().array if isinstance(stream, Drawn) else stream.array if isinstance(stream, Values) else None
    if array is None or array.shape != kept.shape:
        return None
    return array if kept.seed is None else projected(array.astype(np.float64), kept.seed)
