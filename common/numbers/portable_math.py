"""Natural logarithm, sine and cosine in float64, the same bits on every machine.

NumPy's own versions have code for each kind of CPU, and their last bit differs. These use only operations
that IEEE 754 defines exactly (+ - * /, rounding to an integer, splitting off the exponent), each in an array
operation of its own, so that no compiler can fuse a multiplication with an addition.

Method: argument reduction with a two-part constant (W. J. Cody and W. Waite, "Software Manual for the
Elementary Functions", 1980), then Taylor series long enough for the reduced range. The `near` functions take tables
of these instead, and short series around the next entry: for float32, in a quarter of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

# ln 2 and pi/2 as a short head, whose product with a small integer is exact, and the rest.
_LN2_HEAD, _LN2_TAIL = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_HALF_PI_HEAD, _HALF_PI_TAIL = 1.57079632673412561417e00, 6.07710050650619224932e-11

_SQRT_HALF = 0.7071067811865476
_TWO_OVER_PI = 0.6366197723675814
_LARGEST_ANGLE = 2.0**19

_LN2 = 0.6931471805599453
_PARTS = 1024  # nodes of the tables of sine and cosine for each radian
_LOG_PARTS = 4096  # nodes of the table of logarithms from 0 to 1

_ATANH_TERMS = [2.0 / (2 * k + 1) for k in range(1, 12)]
_SIN_TERMS = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(1, 9)]
_COS_TERMS = [(-1.0) ** k / math.factorial(2 * k) for k in range(2, 10)]


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm of positive finite numbers."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    f = np.where(low, mantissa + mantissa, mantissa) - 1.0
    k = exponent.astype(np.float64) - low
    # log(1 + f) = 2 atanh(s), written so that the small terms are added before the large one.
    s = f / (f + 2.0)
    z = s * s
    half_square = 0.5 * (f * f)
    correction = s * (half_square + z * _polynomial(z, _ATANH_TERMS)) + k * _LN2_TAIL
    return k * _LN2_HEAD - ((half_square - correction) - f)


def sincos(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sine and cosine of angles in radians. Raises ValueError unless |x| <= 2**19."""
    if x.size and not float(np.max(np.abs(x))) <= _LARGEST_ANGLE:
        raise ValueError(f"an angle is not within +-{_LARGEST_ANGLE:.0f}")
    turns = np.rint(x * _TWO_OVER_PI)
    r = (x - turns * _HALF_PI_HEAD) - turns * _HALF_PI_TAIL
    z = r * r
    sine = r + r * (z * _polynomial(z, _SIN_TERMS))
    half_square = 0.5 * z
    head = 1.0 - half_square
    cosine = head + (((1.0 - head) - half_square) + z * (z * _polynomial(z, _COS_TERMS)))
    quarter = turns.astype(np.int64) & 3
    odd = (quarter & 1) == 1
    sin_sign = np.where(quarter >= 2, -1.0, 1.0)
    cos_sign = np.where((quarter == 1) | (quarter == 2), -1.0, 1.0)
    return sin_sign * np.where(odd, cosine, sine), cos_sign * np.where(odd, sine, cosine)


def near_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm of numbers in (0, 1], with 1e-16 more error than the nearest table entry."""
    mantissa, exponent = np.frexp(x)
    node = np.rint(mantissa * _LOG_PARTS)
    total: NDArray[np.float64] = _logs()[node.astype(np.intp)]
    total += exponent.astype(np.float64) * _LN2
    node *= 1 / _LOG_PARTS
    r = mantissa - node
    r /= node
    series = r * -0.25
    for term in (1 / 3, -0.5):
        series += term
        series *= r
    series *= r
    series += r
    total += series
    return total


def near_sincos(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sine and cosine of radians from 0 to a full turn, with 1e-16 more error than the nearest table entry."""
    node = np.rint(x * _PARTS)
    index = node.astype(np.intp)
    sine_there, cosine_there = (table[index] for table in _circle())
    node *= -1 / _PARTS
    r = np.add(node, x, out=node)
    z = r * r
    s = z * (-1 / 6)  # the sine of r, and below its cosine less 1
    s *= r
    s += r
    z *= z * (1 / 24) - 0.5
    sine = sine_there * z
    sine += cosine_there * s
    sine += sine_there
    z *= cosine_there
    s *= sine_there
    z -= s
    z += cosine_there
    return sine, z


@cache
def _logs() -> NDArray[np.float64]:
    """Return log(i / 4096) at index i, from a half up, since no mantissa is smaller."""
    nodes = np.full(_LOG_PARTS + 1, 1.0)
    nodes[_LOG_PARTS // 2 :] = np.arange(_LOG_PARTS // 2, _LOG_PARTS + 1) / _LOG_PARTS
    return log(nodes)


@cache
def _circle() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sine and cosine of i / 1024 at index i, for a little more than a full turn."""
    return sincos(np.arange(7 * _PARTS) / _PARTS)


def _polynomial(z: NDArray[np.float64], terms: Sequence[float]) -> NDArray[np.float64]:
    """Return terms[0] + terms[1] z + terms[2] z^2 + ... by Horner's rule."""
    total = np.full_like(z, terms[-1])
    for term in reversed(terms[:-1]):
        total = total * z + term
    return total
