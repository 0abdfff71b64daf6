"""Weights that a file has in several tensors, such as q, k and v of one layer: they are joined while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

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
    counts: tuple[int, ...]  # of the tensors of each
    axis: int | None

    def shape(self, pieces: Sequence[TensorSlice]) -> Shape:
        """Return the shape of the values; () if the parts do not go together."""
        shapes = [code.shape(own) if code else own[0].shape for code, own in self._apart(pieces)]
        if self.axis is not None:
            same = len(set(shapes)) == 1 and self.axis <= len(shapes[0])
            return (*shapes[0][: self.axis], len(shapes), *shapes[0][self.axis :]) if same else ()
        same = all(shapes) and len({shape[1:] for shape in shapes}) == 1
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if same else ()

    def values(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the values in float32, from `raw` of the pieces."""
        import numpy as np

        parts = [code.values(own) if code else widened(own[0]) for code, own in self._apart(arrays)]
        return np.concatenate(parts) if self.axis is None else np.stack(parts, self.axis)

    def _apart(self, tensors: Sequence[Any]) -> Iterator[tuple[Code | None, Sequence[Any]]]:
        """Yield the code and the tensors of each part."""
        ends = accumulate(self.counts)
        for code, count, end in zip(self.codes, self.counts, ends, strict=True):
            yield code, tensors[end - count : end]


def join(named: Mapping[str, Source], joins: Joins) -> dict[str, Source]:
    """Return the weights by name; those in `joins` are made of their parts if all of these are there."""
    result = dict(named)
    for name, (parts, axis) in joins.items():
        if name not in named and all(part in named for part in parts):
            sources = [result.pop(part) for part in parts]
            code = Joined(
                tuple(source.code for source in sources), tuple(len(source.pieces) for source in sources), axis
            )
            result[name] = Source(tuple(piece for source in sources for piece in source.pieces), code)
    return result
