"""Which tensors of a file together are one weight: those that hold its codes, and those that say what they mean.

A weight in fewer bits is a few tensors: codes, scales, perhaps zero points. `sources` groups them, by what the headers
say and never by a file's name, so that the planner sees one source for each weight whatever it is kept as. A layout is
a function here that takes its tensors out of `pieces` and returns their sources.
"""

from __future__ import annotations

from collections.abc import Callable

from qwenimg.common.base.shape import Shape
from qwenimg.common.weights.float8 import FORMATS, Float8
from qwenimg.common.weights.plan import Piece, Source

Pieces = dict[str, Piece]  # by the tensor's name, in the order of files and bytes
Expected = Callable[[str], Shape | None]  # the shape of the weight with this name, where the model has one


def sources(pieces: Pieces, expected: Expected) -> dict[str, Source]:
    """Every weight of `pieces` by the name of its first tensor, in their order. Raises ModelError."""
    left = dict(pieces)
    found = _float8(left)
    found |= {name: Source((piece,)) for name, piece in left.items()}
    return {name: found[name] for name in pieces if name in found}


def _float8(left: Pieces) -> dict[str, Source]:
    """Plain 8-bit floats, without scales."""
    made = {}
    for name, piece in list(left.items()):
        for format in FORMATS:
            if piece.dtype == format:
                made[name] = Source((left.pop(name),), Float8(format))
    return made
