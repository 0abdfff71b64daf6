"""Weights that a file has in several tensors, such as q, k and v of one layer: they are joined while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from qwenimg.common.base.shape import Shape
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.quant.bits import widened
from qwenimg.common.weights.plan import Code, Source

if TYPE_CHECKING:
    import numpy as np


class Join(NamedTuple):
    """The names of a weight's parts, and the axis along which they are stacked; None: their rows follow each other."""

    parts: tuple[str, ...]
    axis: int | None = None


Joins: TypeAlias = Mapping[str, Join]
"""By the name of the weight."""


@dataclass(frozen=True)
class Joined:
    """Decodes a weight that is stored as several tensors, each quantized in its own way or not at all."""

    codes: tuple[Code | None, ...]
    axis: int | None

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        """Return the shape of the values; () if the parts do not go together."""
        shapes = [code.shape([piece]) if code else piece.shape for code, piece in zip(self.codes, pieces, strict=True)]
        if self.axis is not None:
            same = len(set(shapes)) == 1 and self.axis <= len(shapes[0])
            return (*shapes[0][: self.axis], len(shapes), *shapes[0][self.axis :]) if same else ()
        same = all(shapes) and len({shape[1:] for shape in shapes}) == 1
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if same else ()

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values in float32, from `raw` of the pieces."""
        import numpy as np

        parts = [
            code.values([array]) if code else widened(array) for code, array in zip(self.codes, arrays, strict=True)
        ]
        return np.concatenate(parts) if self.axis is None else np.stack(parts, self.axis)


def join(named: Mapping[str, Source], joins: Joins) -> dict[str, Source]:
    """Return the weights by name; those in `joins` are made of their parts if each of these is there as one tensor."""
    result = dict(named)
    for name, (parts, axis) in joins.items():
        if name not in named and all(part in named and len(named[part].pieces) == 1 for part in parts):
            sources = [result.pop(part) for part in parts]
            code = Joined(tuple(source.code for source in sources), axis)
            result[name] = Source(tuple(source.first for source in sources), code)
    return result
