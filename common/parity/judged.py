"""Comparison of a backend's results of a recorded block with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.parity import constants, parity
from qwenimg.common.parity.blocks import ComponentPolicy
from qwenimg.common.parity.passport.passport import Figure, Recorded, RecordedResult
from qwenimg.common.parity.sample import Drawn, projected
from qwenimg.common.runtime.traced import Values


def figures(
    part: ComponentPolicy, recorded: Recorded, results: Sequence[Values] | None = None, *, wide: bool = False
) -> tuple[Figure, ...]:
    """Return the figures of each result of a block, or () without float64. results: of this backend; None takes the
    recording backend's. wide: the results were computed in float32, whatever the policy."""
    block = part.block(recorded.block, recorded.path)
    assert block is not None, recorded.name
    if any(result.exact is None for result in recorded.results):
        return ()
    rows = []
    for i, result in enumerate(recorded.results):
        kind = f"{part.component.network}.{recorded.block}"
        dtype = "float32" if wide else part.dtype(block, recorded.path, returned(recorded))
        case = parity.Case(
            component=kind,
            dtype=dtype,
            returned="float32" if wide else result.dtype,
            blocks=part.updates(block, recorded.path),
            k=constants.limit(kind, dtype) * result.gain,
        )
        output = _output(result, None if results is None else results[i])
        stream = _stream(recorded, result, i) if i < block.streams else None
        assert result.exact is not None
        verdict = parity.judge(case, result.exact, output, stream)
        error = verdict.figures.relative / case.unit
        failures = (*(f"reference: {why}" for why in verdict.reference_faults), *verdict.failures)
        rows.append(Figure(error=error, allowed=verdict.allowed / case.unit, failures=failures))
    return tuple(rows)


def returned(recorded: Recorded) -> list[str]:
    """Return the dtypes of a block's results."""
    return [result.dtype for result in recorded.results]


def compared(now: Figure, then: Figure | None, dtype: str) -> Figure:
    """Add a failure if an error in 16 bit or 8 is far above the recorded one, as most faults are smaller than a
    rounding."""
    if dtype == "float32" or then is None:
        return now
    in_8_bits = dtype == "int8"
    most = parity.ALIKE * then.error if in_8_bits else max(parity.LIMIT[dtype], parity.RATIO * then.error)
    if now.error <= most:
        return now
    text = f"error {now.error:.3g} u, where it was recorded {then.error:.3g} u"
    return replace(now, failures=(*now.failures, text))


def _output(recorded: RecordedResult, result: Values | None) -> parity.Output:
    if result is None:
        return parity.Output(values=recorded.values, dtype=recorded.dtype)
    array: NDArray[Any] = result.array
    if recorded.seed is not None and array.shape == recorded.shape:
        array = projected(array.astype(np.float64), recorded.seed)
    return parity.Output(values=array, dtype=result.dtype)


def _stream(recorded: Recorded, result: RecordedResult, place: int) -> NDArray[Any] | None:
    """Return the argument that the result updates, or None if it has another shape, as with a shortcut."""
    stream = recorded.arguments[place]
    array = stream.values().array if isinstance(stream, Drawn) else stream.array if isinstance(stream, Values) else None
    if array is None or array.shape != result.shape:
        return None
    return array if result.seed is None else projected(array.astype(np.float64), result.seed)
