"""The relative error of arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """L2 of the difference to that of `b`, in float64; the shapes are equal."""
    assert a.shape == b.shape
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def relative_float32(a: np.ndarray, b: np.ndarray) -> float:
    """The same for `a` in float32."""
    assert a.dtype == np.float32
    return relative(a, b)


def largest(values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest relative error of arrays with the same names."""
    assert values.keys() == expected.keys()
    return max(relative(values[name], np.asarray(one)) for name, one in expected.items())
