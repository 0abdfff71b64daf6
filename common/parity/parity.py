"""The criterion for a backend's results: an error against a float64 reference, in units of the dtype's roundoff.

Two backends are not compared with each other: their difference does not tell which of them is wrong, hides errors that
they share, and shrinks if both round alike. The reference runs in float64 on weights and inputs that were rounded to
the tested dtype first, so that the error comes from the arithmetic and not from storage.

The law after the limits: relative error = K * u * sqrt(blocks), with u the unit roundoff. A transformer block's output
measures K = 1.4 to 2.0 in float32 and 0.64 in bfloat16 and float16; the limits are three times that. In float32 they
test correctness. In 16 bits most faults are smaller than the roundings, so there the limits and the ratio of the
backends' errors test the precision policy: a forgotten float32 accumulation doubles the ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.runtime.engine import Array

# int8: half of the distance of two whole numbers, relative to a row's largest, 127
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 1 / 254}
# The largest K of the relative error. In 8 bits a product's is a row's largest value over its rms and sqrt(3): 2 for
# rows of normal values, 4 where one group of 256 has nearly all that 12,288 have.
LIMIT = {"float32": 6.0, "bfloat16": 2.0, "float16": 2.0, "int8": 4.0}
MARGIN = 3.0  # between a recorded K and the limit
LARGEST = 5.0  # times the limit: K of the largest error over the largest value, since single elements scatter further
RATIO = 2.0  # the largest ratio of the backends' errors in 16 bits
# And in 8, where rounding towards zero would double the error: of the same blocks on two machines 0.95 to 1.08 were
# measured, and 0.77 to 1.09 of projections of their results
ALIKE = 1.4
STORED = 1.0  # u of a residual stream per block: two additions, each rounding by 0.42 u rms and 1 u at most
CENTRED = 4.0  # u32 per mean / deviation of a LayerNorm's input, since it subtracts a rounded mean (measured 2.5)


@dataclass(frozen=True, kw_only=True)
class Output:
    """A result of a backend: its values, and the name of the dtype that they had there."""

    values: NDArray[Any]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """The subject of a judgement, and its units."""

    component: str
    dtype: str  # the dtype under test, whose unit roundoff is the unit of errors
    returned: str  # the dtype that the output must have
    blocks: int = 1
    offset: float = 0.0  # mean / deviation of the input of a LayerNorm in it
    k: float | None = None  # the component's limit in place of `LIMIT`

    @property
    def unit(self) -> float:
        return UNIT[self.dtype]

    @property
    def allowed(self) -> float:
        """The largest relative error that passes, without the rounding of a residual stream."""
        k = LIMIT[self.dtype] if self.k is None else self.k
        return k * self.unit * math.sqrt(self.blocks) + CENTRED * self.offset * UNIT["float32"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The errors of one backend against the reference. Both are NaN if they cannot be computed."""

    relative: float = math.nan  # |y - r| / |r|, the square root of the normalised mean square error
    largest: float = math.nan  # max |y - r| / max |r|
    non_finite: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockVerdict:
    """The errors of one output, their limits, and the failures; without failures it passes."""

    figures: Figures
    allowed: float
    allowed_largest: float
    reference_faults: tuple[str, ...]
    failures: tuple[str, ...]


def judge(case: Case, reference: NDArray[Any], output: Output, stream: NDArray[Any] | None = None) -> BlockVerdict:
    """Judge an output against `reference`, float64 of the same shape.

    With `stream`, the input of a residual block, the error is measured on its update (output - input), relative to the
    update: on a large stream the whole output would hide every fault. The rounding of the stream's own dtype is allowed
    in addition."""
    reference = np.asarray(reference, np.float64)
    update = update_of(reference, stream)
    carried = 0.0 if stream is None else STORED * UNIT[case.returned] * math.sqrt(case.blocks)
    allowed = case.allowed + carried * _ratio(_length(reference), _length(update))
    largest = LARGEST * case.allowed + LARGEST * carried * _ratio(_peak(reference), _peak(update))
    figures = _measure(output, reference, update)
    return BlockVerdict(
        figures=figures,
        allowed=allowed,
        allowed_largest=largest,
        reference_faults=tuple(_reference_faults(reference, update)),
        failures=(
            *_faults(case, output, reference.shape, figures),
            *_excess(figures, case.unit, allowed, largest),
        ),
    )


def update_of(reference: NDArray[Any], stream: NDArray[Any] | None) -> NDArray[Any]:
    """Return the update of a residual block to its `stream`. Without a stream it is the whole result, also if the block
    adds nothing, since then the stream must stay unchanged."""
    update = reference if stream is None else reference - np.asarray(stream, np.float64)
    return update if update.any() else reference


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype in any framework, such as `bfloat16`."""
    return str(array.dtype).rpartition(".")[2]


# Figures


def _measure(output: Output, reference: NDArray[np.float64], update: NDArray[np.float64]) -> Figures:
    values = np.asarray(output.values, np.float64)
    bad = int(np.count_nonzero(~np.isfinite(values)))
    if values.shape != reference.shape or bad:
        return Figures(non_finite=bad)
    error = values - reference
    relative = _ratio(_length(error), _length(update))
    return Figures(relative=relative, largest=_ratio(_peak(error), _peak(update)))


def _length(x: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(x.ravel()))


def _peak(x: NDArray[np.float64]) -> float:
    return float(np.abs(x).max(initial=0.0))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


# Faults: every comparison is written so that a NaN fails it


def _reference_faults(reference: NDArray[np.float64], update: NDArray[np.float64]) -> list[str]:
    if not np.isfinite(reference).all():
        return ["has non-finite values"]
    return [] if update.any() else ["is zero, so nothing can be held against it"]


def _faults(case: Case, output: Output, shape: tuple[int, ...], figures: Figures) -> list[str]:
    faults = []
    if output.values.shape != shape:
        faults.append(f"shape {list(output.values.shape)}, expected {list(shape)}")
    if output.dtype != case.returned:
        faults.append(f"dtype {output.dtype}, expected {case.returned}")
    if figures.non_finite:
        faults.append(f"{figures.non_finite} non-finite values")
    return faults


def _excess(figures: Figures, unit: float, allowed: float, largest: float) -> list[str]:
    faults = []
    if not figures.relative <= allowed:
        faults.append(f"error {figures.relative / unit:.3g} u, at most {allowed / unit:.3g} u")
    if not figures.largest <= largest:
        faults.append(f"largest error {figures.largest / unit:.3g} u, at most {largest / unit:.3g} u")
    return faults
