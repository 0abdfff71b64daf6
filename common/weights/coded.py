"""Which tensors of a file together are one weight: those that hold its codes, and those that say what they mean.

A weight in fewer bits is a few tensors: codes, scales, perhaps zero points. `grouped` does that, by what the headers
say and never by a file's name, so that the planner sees one source for each weight whatever it is kept as. A layout is
a function that takes its tensors out of `pieces` and returns their sources: here, or in `comfy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.codes import block_float
from qwenimg.common.codes.affine import GROUPS, WIDTHS, Affine, of_widths
from qwenimg.common.codes.block_float import BlockFloat
from qwenimg.common.codes.eight_bits import EightBits, format_of
from qwenimg.common.codes.gguf_blocks import READERS, Blocks
from qwenimg.common.formats.stored import DTYPES, Piece
from qwenimg.common.weights import comfy
from qwenimg.common.weights.plan import Source

Pieces = dict[str, Piece]  # by the tensor's name, in the order of files and bytes
Expected = Callable[[str], Shape | None]  # the shape of the weight with this name, where the model has one


class Grouped(NamedTuple):
    """The weights of files, by the names of their first tensors; and the tensors that are known and of no use."""

    sources: dict[str, Source]
    unused: frozenset[str]


def grouped(pieces: Pieces, expected: Expected, notes: Mapping[str, str]) -> Grouped:
    """Every weight of `pieces`, in their order. `notes`: the metadata of the headers. Raises ModelError."""
    comfy.refuse_others(pieces)
    left = dict(pieces)
    wanted = {name: None for name in left if expected(name) is not None}
    scaled, unused = comfy.scaled(left, wanted, notes)
    found = scaled | _packed(left, expected) | _float8(left) | _blocks(left)
    found |= {name: Source((piece,)) for name, piece in left.items()}
    return Grouped({name: found[name] for name in pieces if name in found}, frozenset(unused))


def _packed(left: Pieces, expected: Expected) -> dict[str, Source]:
    """MLX's: X.weight U32, X.scales and, for affine codes, X.biases. Which code, the true width says; what a file
    says of it is not needed, and not always there."""
    made = {}
    for name in [name for name, piece in left.items() if piece.dtype == "U32" and name.endswith(".weight")]:
        codes, shape = left[name], expected(name)
        if shape is None:
            continue  # of no use or unknown: the planner's to say
        layer = name.removesuffix(".weight")
        parts = [left.get(f"{layer}.{part}") for part in ("scales", "biases")]
        scales, biases = parts
        if scales is None:
            raise bad(codes.file.path, f"tensor '{clean(name, 80)}' holds codes (U32) without scales")
        if biases is None:
            made[name] = Source((codes, scales), _block_float(codes, scales, shape))
        else:
            made[name] = Source((codes, scales, biases), _code(codes, scales, biases, shape))
        for part in made[name].pieces:
            del left[part.key]
    return made


def _code(codes: Piece, scales: Piece, biases: Piece, shape: Shape) -> Affine:
    """Raises ModelError where the three do not fit together, or to a weight of this shape."""
    last = [piece.shape[-1] if piece.shape else 0 for piece in (codes, scales)]
    one = of_widths(prod(shape[1:]) if len(shape) > 1 else 0, *last)  # of a kernel of one point too
    rows = {codes.shape[:-1], scales.shape[:-1], biases.shape[:-1]}
    same = scales.shape == biases.shape and scales.dtype == biases.dtype and scales.dtype in DTYPES
    if one is None or len(rows) != 1 or not same:
        shapes = " and ".join(str(list(piece.shape)) for piece in (codes, scales, biases))
        raise bad(
            codes.file.path,
            f"tensor '{clean(codes.key, 80)}': codes, scales and biases of {shapes} are no weight {list(shape)} in "
            f"{', '.join(map(str, WIDTHS))} bits by groups of {', '.join(map(str, GROUPS))}",
        )
    return one


def _block_float(codes: Piece, scales: Piece, shape: Shape) -> BlockFloat:
    """Raises ModelError where the two do not fit together, or to a weight of this shape."""
    one = block_float.of_widths(prod(shape[1:]), *(piece.shape[-1] if piece.shape else 0 for piece in (codes, scales)))
    if one is None or codes.shape[:-1] != scales.shape[:-1] or scales.dtype not in block_float.SCALES:
        raise bad(
            codes.file.path,
            f"tensor '{clean(codes.key, 80)}': codes {list(codes.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)} without biases are no weight {list(shape)} in {', '.join(block_float.MODES)}",
        )
    return one


def _float8(left: Pieces) -> dict[str, Source]:
    """Plain 8-bit floats, without scales."""
    made = {}
    for name, piece in list(left.items()):
        if format := format_of(piece.dtype):
            made[name] = Source((left.pop(name),), EightBits(format))
    return made


def _blocks(left: Pieces) -> dict[str, Source]:
    """GGUF's blocks."""
    names = [name for name, piece in left.items() if piece.dtype in READERS]
    return {name: Source((piece,), Blocks(piece.dtype)) for name in names for piece in [left.pop(name)]}
