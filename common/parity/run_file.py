"""The stations of a run in the JSON of a passport: `name`, the tensors `given` and `made`, and the number `own`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.text import clean
from qwenimg.common.parity.stations import FARTHEST, Arrays, Station

MOST = 10_000  # stations of a run
ARRAYS = 8  # of one station, each way
NAME = 200  # characters


def written(run: Sequence[Station], name: Callable[[NDArray[Any], str], str]) -> list[dict[str, Any]]:
    """Return the JSON of `run`. `name` keeps an array in a dtype of safetensors and gives its name."""
    return [
        {
            "name": station.name,
            "given": [name(array, _dtype(array)) for array in station.given],
            "made": [name(array, _dtype(array)) for array in station.made],
            "own": station.own,
        }
        for station in run
    ]


def _dtype(array: NDArray[Any]) -> str:
    """The smallest dtype that loses nothing: states that were 16 bit are so in the file."""
    if array.dtype.kind != "f":
        return "I64"
    if array.dtype == np.float64:
        return "F64"
    if not (np.ascontiguousarray(array, "<f4").view("<u4") & 0xFFFF).any():
        return "BF16"
    with np.errstate(over="ignore"):
        return "F16" if np.array_equal(array.astype(np.float16).astype(np.float32), array) else "F32"


def parsed(document: Any, arrays: Mapping[str, NDArray[Any]]) -> tuple[Station, ...]:
    """Return the stations in `document`. Raises ValueError, TypeError and KeyError for what is not of the schema."""
    if not isinstance(document, list) or len(document) > MOST:
        raise TypeError("`run` is no list of stations")
    run = tuple(_station(one, arrays) for one in document)
    if len({station.name for station in run}) != len(run):
        raise ValueError("two stations of one name")
    return run


def _station(one: Any, arrays: Mapping[str, NDArray[Any]]) -> Station:
    if not isinstance(one, dict) or set(one) != {"name", "given", "made", "own"}:
        raise TypeError("a station of other fields")
    name = one["name"]
    if not isinstance(name, str) or not 0 < len(name) <= NAME:
        raise TypeError(f"a station called {clean(name, 30)}")
    return Station(name=name, given=_arrays(one["given"], arrays), made=_arrays(one["made"], arrays), own=_own(one))


def _arrays(names: Any, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    if not isinstance(names, list) or len(names) > ARRAYS or not all(isinstance(name, str) for name in names):
        raise TypeError("a station's arrays are no list of tensors")
    found = tuple(arrays[name] for name in names)
    if not all(np.isfinite(array).all() for array in found):
        raise ValueError("a station of values that are not finite")
    return found


def _own(one: Mapping[str, Any]) -> float | None:
    own = one["own"]
    if own is None:
        return None
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own <= FARTHEST or not math.isfinite(own):
        raise ValueError(f"a station's own distance is {clean(own, 30)}")
    return float(own)
