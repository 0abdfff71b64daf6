"""A test of float32, bfloat16 and float16 on a device: single operations of the networks against float64.

A dtype's unit roundoff u bounds one rounding. An operation that sums in float32 and rounds once at the end is off by
about 0.4 u in norm. TF32 keeps 10 bits of a float32 product's inputs, which makes it 1,000 times worse; sums in 16 bit
show as several u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.runtime.engine import Engine

Array = NDArray[np.float64]
Shapes = tuple[tuple[int, ...], ...]
U = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# The largest relative error (L2) that a dtype's precision allows. Float32 sums of 1,000 terms are off by some 30 u if
# they are added one by one; a 16-bit result by 0.42 u, and twice that if a bias or a score is rounded too.
LIMITS = {"float32": 1e-5, "bfloat16": 1.5 * U["bfloat16"], "float16": 1.5 * U["float16"]}


def matmul(x: Array, weight: Array) -> Array:
    return np.asarray(x @ weight.T)


def conv2d(x: Array, weight: Array) -> Array:
    """Convolve with a 3x3 kernel, padded by one."""
    height, width = x.shape[2:]
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    taps = [(i, j) for i in range(3) for j in range(3)]
    parts = (
        np.einsum("bchw,oc->bohw", padded[:, :, i : i + height, j : j + width], weight[:, :, i, j], optimize=True)
        for i, j in taps
    )
    return np.asarray(sum(parts))


def attention(q: Array, k: Array, v: Array) -> Array:
    """[B L H D] each -> [B L H*D]"""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True)) @ v
    return np.asarray(out.transpose(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1))


# name: the operation in float64, and the shapes of its inputs
OPERATIONS: dict[str, tuple[Callable[..., Array], Shapes]] = {
    "matmul": (matmul, ((128, 1024), (256, 1024))),
    "conv2d": (conv2d, ((1, 128, 64, 64), (128, 128, 3, 3))),  # Metal takes Winograd's method at these sizes
    "attention": (attention, ((1, 160, 4, 128),) * 3),
}
SMALL_PRODUCT = ((256, 256), (256, 256))  # at every start: milliseconds
SMALL_CONV = ((1, 64, 16, 16), (64, 64, 3, 3))  # for a CPU, which has no faster method of lower precision


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The errors and the speed of one dtype on one device. errors: relative (L2), by operation."""

    dtype: str
    errors: dict[str, float]
    flops: float  # multiplications and additions a second of a linear layer

    @property
    def faults(self) -> list[str]:
        """The operations that are less precise than the dtype."""
        return [name for name, error in self.errors.items() if not error <= LIMITS[self.dtype]]

    @property
    def bits(self) -> float:
        """The bits of precision of the worst operation: float32 has 24, TF32 11."""
        return -math.log2(max(max(self.errors.values()), 2.0**-24))

    def verdict(self) -> str:
        if not self.faults:
            return "as its name says"
        if self.dtype == "float32":
            return f"is not float32: {', '.join(self.faults)} with about {self.bits:.0f} bits, not 24"
        return f"coarser than its name says: {', '.join(self.faults)}"


def measure(engine: Engine, dtype: str) -> Measured:
    """Measure the errors and the speed of `dtype` on the engine's device."""
    errors = {name: error(engine, dtype, name) for name in OPERATIONS}
    return Measured(dtype=dtype, errors=errors, flops=engine.rate.again("matmul", dtype))


def float32_error(engine: Engine) -> float:
    """Return the relative error (L2) of a 256^3 float32 product, which takes milliseconds."""
    return error(engine, "float32", "matmul", SMALL_PRODUCT)


def error(engine: Engine, dtype: str, operation: str, shapes: Shapes = ()) -> float:
    """Return the relative L2 error of an operation against float64. The inputs are exact in `dtype`. shapes: of the
    inputs; by default the usual ones."""
    exact, usual = OPERATIONS[operation]
    if operation == "conv2d" and not engine.on_gpu:
        usual = SMALL_CONV
    generator = np.random.RandomState(0)
    arrays = [nearest(generator.standard_normal(shape).astype(np.float32), dtype) for shape in shapes or usual]
    reference = exact(*(array.astype(np.float64) for array in arrays))
    result = engine.operate(operation, dtype, arrays).astype(np.float64)
    return float(np.linalg.norm(result - reference) / np.linalg.norm(reference))
