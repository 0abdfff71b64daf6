"""Initial noise: the numbers of torch's CPU generator for a seed, without torch, the same bits on every machine.

- The integers are MT19937's 32-bit stream; NumPy's `RandomState` seeds it as torch does and is frozen.
- A uniform number is the low 24 bits of one integer, over 2**24.
- Normal numbers come by Box and Muller's transform in blocks of 16: number j pairs with number j + 8.
- If the count is no multiple of 16, the last 16 numbers are drawn again, from 16 fresh uniforms.

Values are rounded to float32 where torch's vectorised x86 code rounds: within 5e-7 of it. torch's code for other CPUs
rounds the angle differently, which moves values by up to 2.3e-6.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.numbers import portable_math
from qwenimg.common.numbers.seeds import check_seed

_BLOCK = 16
FEWEST = _BLOCK  # the fewest numbers that can be drawn at a time
_CHUNK = 1 << 16  # numbers drawn at a time: bounds the float64 scratch memory; a multiple of _BLOCK
_LOW_BITS = (1 << 32) - 1
_TWO_PI = np.float32(6.2831855)


def normal(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return standard normal float32 numbers of `shape`, equal to `torch.randn` with a CPU generator of this `seed`.

    Raises UsageError for a seed outside 0 .. 2**64 - 1, ValueError for fewer than 16 numbers (torch draws those by
    another method).
    """
    return TorchCPUGenerator(seed).normal(shape)


class TorchCPUGenerator:
    """A generator to draw from several times, like torch's CPU generator."""

    def __init__(self, seed: int):
        check_seed(seed)
        self._integers = np.random.RandomState(seed & _LOW_BITS)

    def normal(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the next standard normal numbers. Raises ValueError for fewer than 16."""
        return _normal(shape, self._integers)


def _normal(shape: tuple[int, ...], stream: np.random.RandomState) -> NDArray[np.float32]:
    count = math.prod(shape)
    if count < _BLOCK:
        raise ValueError(f"noise of shape {shape} has {count} numbers; at least {_BLOCK} are needed")
    values = np.empty(count, np.float32)
    whole = count - count % _BLOCK
    for start in range(0, whole, _CHUNK):
        stop = min(start + _CHUNK, whole)
        values[start:stop] = _box_muller(_uniform(stream, stop - start))
    if whole < count:
        _uniform(stream, count - whole)  # torch draws these too, before it replaces the last 16
        values[-_BLOCK:] = _box_muller(_uniform(stream, _BLOCK))
    return values.reshape(shape)


def low_bits_warning(seed: int) -> str | None:
    """Return a warning if a seed has more than 32 bits: the generator uses the low 32. Else None."""
    if seed <= _LOW_BITS:
        return None
    return f"seed {seed} has more than 32 bits; it gives the same noise as seed {seed & _LOW_BITS}"


def sha256(array: NDArray[Any]) -> str:
    """Return the SHA-256 of the numbers of `array` in C order and little-endian bytes, in hexadecimal."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()


def _uniform(stream: np.random.RandomState, count: int) -> NDArray[np.float32]:
    """Return the next `count` float32 numbers in [0, 1), multiples of 2**-24."""
    integers = stream.randint(0, 1 << 32, size=count, dtype=np.uint32)
    return (integers & np.uint32((1 << 24) - 1)).astype(np.float32) * np.float32(2.0**-24)


def _box_muller(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return normal numbers from uniform ones, [16 n] -> [16 n] (G. E. P. Box and M. E. Muller, 1958)."""
    u = uniform.reshape(-1, 2, _BLOCK // 2)
    log_u = portable_math.near_log((np.float32(1) - u[:, 0]).astype(np.float64)).astype(np.float32)
    radius = np.sqrt(np.float32(-2) * log_u)
    sine, cosine = portable_math.near_sincos((_TWO_PI * u[:, 1]).astype(np.float64))
    pair = np.empty(u.shape, np.float32)
    np.multiply(radius, cosine.astype(np.float32), out=pair[:, 0])
    np.multiply(radius, sine.astype(np.float32), out=pair[:, 1])
    return pair.reshape(-1)
