"""Substitutes for arrays that are too large to be stored: random arrays like them, projections of them, and pictures
for a model that sees some.

All have the same bits on every machine: a seed gives the noise of `numbers.noise`, and signs are bits of MT19937.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.text import clean
from qwenimg.common.numbers.noise import FEWEST, TorchCPUGenerator
from qwenimg.common.numbers.rounding import nearest
from qwenimg.common.runtime.traced import TINY, Values

SEEN = ((96, 128), (128, 80))  # height and width of the pictures that a recorded model sees
FLOATS = ("float32", "float16", "bfloat16")
LARGEST = 3e38  # the largest number: float32 holds it
MAX_DRAWN = 1 << 24  # values of one random array
MAX_RANK = 8
PROJECTIONS = 64  # of one array: they give its length within 9 % (one standard deviation)
_BYTES = 1 << 12  # of the signs of each sum that are unpacked at a time
CHANNELS = 32  # the most channels with a mean and a deviation of their own
SMALL = 2.0**-8  # rms at which an epsilon of 1e-5 and one of 1e-6 differ by 30 %
OUTLIER = 4.0  # a channel with more than this times the median channel's rms has its own mean and deviation


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The description of a random array: normal numbers of this rms, except for the outlier channels of an axis."""

    dtype: str
    shape: tuple[int, ...] = field(metadata={"min": 1, "max": 2**31 - 1})
    seed: int = field(metadata={"min": 0, "max": 2**32 - 1})
    axis: int = field(metadata={"min": -MAX_RANK, "max": MAX_RANK - 1})
    rms: float = field(metadata={"min": 0, "max": LARGEST})
    # Number, mean and deviation of each outlier channel.
    channels: tuple[tuple[int, float, float], ...] = field(metadata={"min": -LARGEST, "max": LARGEST})

    def check(self) -> None:
        """Check a description from a file. Raises ValueError."""
        rank, count = len(self.shape), prod(self.shape)
        if self.dtype not in FLOATS:
            raise ValueError(f"{clean(self.dtype, 30)!r} is drawn, which is none of {', '.join(FLOATS)}")
        if not FEWEST <= count <= MAX_DRAWN or not 1 <= rank <= MAX_RANK:
            shown = clean(list(self.shape), 60)
            raise ValueError(f"an array of shape {shown} is drawn; it has {FEWEST} to {MAX_DRAWN} values")
        if not -rank <= self.axis < rank:
            raise ValueError(f"axis {self.axis} is not in the shape {list(self.shape)}")
        if not all(0 <= channel < self.shape[self.axis] for channel, _, _ in self.channels):
            raise ValueError(f"a channel is not in axis {self.axis} of the shape {list(self.shape)}")

    def values(self) -> Values:
        """Return the array, with the same bits on every machine."""
        array = TorchCPUGenerator(self.seed).normal(self.shape).astype(np.float64)
        scaled = np.moveaxis(array, self.axis, -1)
        loud = {channel: mean + deviation * scaled[..., channel] for channel, mean, deviation in self.channels}
        array *= self.rms
        for channel, values in loud.items():
            scaled[..., channel] = values
        return Values(self.dtype, nearest(array.astype(np.float32), self.dtype))


def drawn_like(values: Values, seed: int, axis: int = -1) -> Drawn | None:
    """Return the description of a random array like `values`, with channels along `axis`; None if it is too small or
    not floating point."""
    array = values.array
    if array.dtype.kind != "f" or array.ndim < 2 or array.size < FEWEST or not np.isfinite(array).all():
        return None
    rows = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).astype(np.float64)
    rms = np.sqrt(np.mean(rows**2, axis=0))
    loud = np.flatnonzero(rms > OUTLIER * np.median(rms))
    loud = loud[np.argsort(rms[loud])[::-1][:CHANNELS]]
    rest = np.delete(rms, loud)
    return Drawn(
        dtype=values.dtype,
        shape=array.shape,
        seed=seed,
        axis=axis,
        rms=float(np.sqrt(np.mean(rest**2))),
        channels=tuple((int(c), float(rows[:, c].mean()), float(rows[:, c].std())) for c in loud),
    )


def equal_rows(values: Values) -> int:
    """Return how often the most frequent row of an array [B L C] is in one of its elements."""
    counts = (np.unique(rows, axis=0, return_counts=True)[1] for rows in values.array)
    return max((int(one.max(initial=0)) for one in counts), default=0)


def smaller(values: Values | Drawn) -> Values | Drawn:
    """Return `values` scaled by a power of two to an rms of about SMALL, or unchanged if it is smaller already."""
    if isinstance(values, Drawn):
        factor = _factor(values.rms)
        channels = tuple((channel, factor * mean, factor * spread) for channel, mean, spread in values.channels)
        return replace(values, rms=factor * values.rms, channels=channels)
    if values.array.dtype.kind != "f":
        return values
    factor = _factor(float(np.sqrt(np.mean(values.array.astype(np.float64) ** 2))))
    return Values(values.dtype, nearest((factor * values.array).astype(np.float32), values.dtype))


def _factor(rms: float) -> float:
    return min(1.0, 2.0 ** round(np.log2(SMALL / rms))) if rms > 0 and np.isfinite(rms) else 1.0


def rounded_otherwise(values: Values, seed: int) -> Values:
    """Return `values` in float64, each moved up or down by TINY of itself, like another rounding; whole numbers
    unchanged."""
    if values.array.dtype.kind != "f":
        return values
    signs = np.random.RandomState(seed).randint(0, 2, values.array.shape) * 2.0 - 1.0
    return Values("float64", values.array.astype(np.float64) * (1 + TINY * signs))


def projected(array: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Return PROJECTIONS sums of all values with random signs, over the root of their number: a vector of about the
    length of `array`. The same holds for differences of arrays."""
    flat = np.ascontiguousarray(array, np.float64).reshape(-1)
    stream, size = np.random.RandomState(seed), (flat.size + 7) // 8
    signs = np.frombuffer(b"".join(stream.bytes(size) for _ in range(PROJECTIONS)), np.uint8).reshape(PROJECTIONS, size)
    positive = np.zeros(PROJECTIONS)
    for start in range(0, size, _BYTES):  # a product for all sums at once takes half the time of one after the other
        values = flat[8 * start : 8 * (start + _BYTES)]
        bits = np.unpackbits(signs[:, start : start + _BYTES], axis=1, count=values.size)
        with np.errstate(invalid="ignore"):  # values that are not finite make sums that are not
            positive += bits.astype(np.float64) @ values
    sums: NDArray[np.float64] = (2 * positive - flat.sum()) / np.sqrt(PROJECTIONS)
    return sums


def called(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of the recorded call: the number of `pictures` in `asked` becomes the pictures."""
    seen = asked.get("pictures") or 0
    pictures = {"image": [_picture(height, width) for height, width in SEEN[:seen]]} if seen else {}
    return {name: value for name, value in asked.items() if name != "pictures"} | pictures


def _picture(height: int, width: int) -> NDArray[np.uint8]:
    """Return a picture with slopes, and with edges in both directions."""
    rows, columns, channels = np.ogrid[:height, :width, :3]
    slopes = rows * (channels + 1) + 2 * columns * (3 - channels)
    return np.asarray((slopes + 90 * (rows // 16 % 2) + 60 * (columns // 24 % 2)) % 256, np.uint8)
