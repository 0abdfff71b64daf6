"""The operations of blocks that are scaled and gated, of both backends, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from qwenimg.backends.mlx import ops as mlx_ops
from qwenimg.backends.torch import ops as torch_ops

EPS = 1e-6
FLOAT32 = 1e-6  # relative L2; measured 1e-7
BACKENDS: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "torch": (torch_ops, lambda x: torch.from_numpy(x)),
    "mlx": (mlx_ops, lambda x: mx.array(x)),
}
RNG = np.random.default_rng(0)
X, SCALE = RNG.standard_normal((2, 5, 12)).astype(np.float32), RNG.standard_normal((1, 1, 12)).astype(np.float32)

SHIFT = RNG.standard_normal((1, 1, 12)).astype(np.float32)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend: str) -> None:
    ops, array = BACKENDS[backend]
    wide, scale = X.astype(np.float64), SCALE.astype(np.float64)
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + EPS)
    results = {
        "unit_norm": (ops.unit_norm(array(X), EPS), normed),
        "scaled": (ops.scaled(array(X), array(SCALE), ops.DTYPES["float32"]), wide * (1 + scale)),
        "modulated": (
            ops.modulated(array(X), array(SHIFT), array(SCALE), ops.DTYPES["float32"]),
            wide * (1 + scale) + SHIFT.astype(np.float64),
        ),
        "gated_gelu_erf": (
            ops.gated_gelu_erf(array(X.copy()), array(2 * X + 1)),
            (2 * wide + 1) * wide * (0.5 + 0.5 * np.vectorize(erf)(wide / np.sqrt(2))),
        ),
        "tanh": (ops.tanh(array(X)), np.tanh(wide)),
    }
    for name, (result, exact) in results.items():
        error = relative(np.asarray(ops.numpy(result)), exact)
        print(f"{backend} {name}: {error:.1e} (limit {FLOAT32})")
        assert error <= FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend: str) -> None:
    """A norm is float32 at least; a scaled stream is rounded once, at the end."""
    ops, array = BACKENDS[backend]
    low = ops.DTYPES["bfloat16"]
    assert ops.unit_norm(ops.stream(array(X), low), EPS).dtype == ops.DTYPES["float32"]
    result = ops.scaled(array(X), array(SCALE), low)
    assert result.dtype == low
    wide = ops.scaled(array(X), array(SCALE), ops.DTYPES["float32"])
    assert np.array_equal(np.asarray(ops.numpy(result)), np.asarray(ops.numpy(ops.stream(wide, low))))
