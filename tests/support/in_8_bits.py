"""Products of 8-bit whole numbers a second time: in numpy's float64 by the definition, and in MLX's float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

EXACT = 1024  # products of at most 127 * 127 add up to less than 2^24


def rounded(x: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows of `x` [rows in] as whole numbers of at most 127, half to even, and the scale of each [rows 1]."""
    wide = x.astype(np.float64)
    scales = np.abs(wide).max(1, keepdims=True) / 127
    return np.rint(np.divide(wide, scales, out=np.zeros_like(wide), where=scales > 0)), scales


def mlx_rounded(x: mx.array) -> tuple[mx.array, mx.array]:
    """The same in float32, int8 and float32."""
    wide = x.astype(mx.float32)
    scales = mx.abs(wide).max(-1, keepdims=True) / 127
    return mx.round(wide / mx.where(scales > 0, scales, 1)).astype(mx.int8), scales


def mlx_sums(whole: mx.array, codes: mx.array) -> mx.array:
    """int32 [rows out] of int8 `whole` [rows in] and `codes` [out in], by products in float32 that are exact."""
    total = mx.zeros((whole.shape[0], codes.shape[0]), mx.int32)
    for i in range(0, codes.shape[1], EXACT):
        a, b = (one[:, i : i + EXACT].astype(mx.float32) for one in (whole, codes))
        total = total + mx.matmul(a, b.T).astype(mx.int32)
    return total


def mlx_linear(whole: mx.array, steps: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
    """The sums, scaled back in float32."""
    return mlx_sums(whole, codes).astype(mx.float32) * steps * scales.T
