"""Encodes GGUF's blocks of 256, which the gguf package only decodes: plainly, by what the codes mean.

Scales are the ends of each group, without the searches and weightings by which makers of files do better.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Type(NamedTuple):
    """Values of a group, bits of a code, and bits of a group's scale; `low`: whether a group has a minimum too."""

    group: int
    bits: int
    scale_bits: int
    low: bool


TYPES = {
    "Q6_K": Type(16, 6, 8, False),
    "Q5_K": Type(32, 5, 6, True),
    "Q4_K": Type(32, 4, 6, True),
    "Q3_K": Type(16, 3, 6, False),
    "Q2_K": Type(16, 2, 4, True),
}


def encode(values: Array, name: str) -> Array:
    """uint8 [n, bytes of a block] of float32 [n, 256]."""
    type = TYPES[name]
    groups = values.astype(np.float32).reshape(len(values), -1, type.group)
    if type.low:
        codes, scales, lows, heads = _with_minimum(groups, type)
        return np.concatenate(_PACKED[name](codes, scales, lows, heads), axis=1)
    codes, scales, heads = _symmetric(groups, type)
    return np.concatenate(_PACKED[name](codes, scales, heads), axis=1)


def _symmetric(groups: Array, type: Type) -> tuple[Array, Array, Array]:
    """Codes moved up to be unsigned, scales likewise, and d. The value of the largest size has the lowest code."""
    half, most = 1 << (type.bits - 1), 1 << (type.scale_bits - 1)
    scale = _largest(groups) / np.float32(-half)
    d = (_largest(scale) / np.float32(-most)).astype("<f2")
    units = _divided(scale, d[:, None], -most, most - 1)
    codes = _divided(groups, (d[:, None].astype(np.float32) * units)[..., None], -half, half - 1)
    return (codes + half).astype(np.uint8).reshape(len(groups), -1), units, d[:, None].view(np.uint8)


def _with_minimum(groups: Array, type: Type) -> tuple[Array, Array, Array, Array]:
    """Codes, scales and minima of the groups, and the bytes of d and dmin."""
    most, top = (1 << type.scale_bits) - 1, (1 << type.bits) - 1
    low = np.minimum(groups.min(-1), 0)
    scale = (groups.max(-1) - low) / np.float32(top)
    d, dmin = ((part.max(-1) / np.float32(most)).astype("<f2") for part in (scale, -low))
    units, minima = _divided(scale, d[:, None], 0, most), _divided(-low, dmin[:, None], 0, most)
    bias = dmin[:, None].astype(np.float32) * minima
    codes = _divided(groups + bias[..., None], (d[:, None].astype(np.float32) * units)[..., None], 0, top)
    heads = np.stack([d, dmin], axis=1).view(np.uint8)
    return (
        codes.astype(np.uint8).reshape(len(groups), -1), units.astype(np.uint8), minima.astype(np.uint8), heads,
    )  # fmt: skip


def _largest(values: Array) -> Array:
    """Of the last axis the value of the largest size, with its sign."""
    at = np.abs(values).argmax(-1)[..., None]
    return np.take_along_axis(values, at, -1)[..., 0]


def _divided(values: Array, by: Array, least: int, most: int) -> Array:
    by = by.astype(np.float32)
    quotient = np.divide(values, by, out=np.zeros_like(values), where=by != 0)
    return np.clip(np.rint(quotient), least, most)


# Bytes


def _packed(codes: Array, width: int, run: int) -> Array:
    """Of each `run` bytes the lowest `width` bits of all, then the next."""
    parts = codes.astype(np.uint8).reshape(len(codes), -1, 8 // width, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(codes), -1)


def _eight(scales: Array, minima: Array, heads: Array) -> list[Array]:
    """6 bits of each: of the last four groups the high two are in the bytes of the first four."""
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, minima)]
    return [heads, *first, scales[:, 4:] & 15 | minima[:, 4:] << 4]


def _q6_k(codes: Array, scales: Array, heads: Array) -> list[Array]:
    low, high = _packed(codes & 15, 4, 64), _packed(codes >> 4, 2, 32)
    return [low, high, scales.astype(np.int8).view(np.uint8), heads]


def _q5_k(codes: Array, scales: Array, minima: Array, heads: Array) -> list[Array]:
    return [*_eight(scales, minima, heads), _packed(codes >> 4, 1, 32), _packed(codes & 15, 4, 32)]


def _q4_k(codes: Array, scales: Array, minima: Array, heads: Array) -> list[Array]:
    return [*_eight(scales, minima, heads), _packed(codes, 4, 32)]


def _q3_k(codes: Array, scales: Array, heads: Array) -> list[Array]:
    units = (scales + 32).astype(np.uint8)
    high, low = _packed(codes >> 2, 1, 32), _packed(codes & 3, 2, 32)
    return [high, low, _packed(units & 15, 4, 8), _packed(units >> 4, 2, 4), heads]


def _q2_k(codes: Array, scales: Array, minima: Array, heads: Array) -> list[Array]:
    return [scales | minima << 4, _packed(codes, 2, 32), heads]


_PACKED = {"Q6_K": _q6_k, "Q5_K": _q5_k, "Q4_K": _q4_k, "Q3_K": _q3_k, "Q2_K": _q2_k}
