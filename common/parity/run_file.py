"""The stations of a run in a passport's JSON: `name`, the tensors `given` and `made`, and the policy's error `own`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.text import clean
from qwenimg.common.parity.passport.passport_schema import StationJson
from qwenimg.common.parity.stations import Arrays, Station


def written(run: Sequence[Station], name: Callable[[NDArray[Any], str], str]) -> list[dict[str, Any]]:
    """Return the JSON of `run`. `name` stores an array in a dtype of safetensors and returns its name."""
    return [
        {
            "name": station.name,
            "given": [name(array, _dtype(array)) for array in station.inputs],
            "made": [name(array, _dtype(array)) for array in station.outputs],
            "own": station.policy_error,
        }
        for station in run
    ]


def _dtype(array: NDArray[Any]) -> str:
    """Return the smallest dtype that loses nothing: states that were 16 bit are so in the file."""
    if array.dtype.kind != "f":
        return "I64"
    if array.dtype == np.float64:
        return "F64"
    if not (np.ascontiguousarray(array, "<f4").view("<u4") & 0xFFFF).any():
        return "BF16"
    with np.errstate(over="ignore"):
        return "F16" if np.array_equal(array.astype(np.float16).astype(np.float32), array) else "F32"


def parsed(stations: Sequence[StationJson], arrays: Mapping[str, NDArray[Any]]) -> tuple[Station, ...]:
    """Return `stations` with their `arrays`. Raises ValueError for one that is not in the file, or not finite."""
    return tuple(
        Station(
            name=one.name,
            inputs=_arrays(one.given, arrays),
            outputs=_arrays(one.made, arrays),
            policy_error=one.own,
        )
        for one in stations
    )


def _arrays(names: Sequence[str], arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(f"tensor {clean(missing[0], 30)!r} of a station is not in the file")
    tensors = tuple(arrays[name] for name in names)
    if not all(np.isfinite(array).all() for array in tensors):
        raise ValueError("a station of values that are not finite")
    return tensors
