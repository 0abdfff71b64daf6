"""The tensors of a file that together are one weight: its codes, and the tensors that give their meaning.

A quantized weight is a few tensors: codes, scales, perhaps zero points. `grouped` finds them by the headers and never
by a file's name, so that the planner has one source for each weight in whatever storage. A layout is a function, here
or in `comfy`, that takes its tensors out of `pieces` and returns their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import DTYPES, TensorSlice, raw
from qwenimg.common.quant import block_float
from qwenimg.common.quant.affine import GROUPS, WIDTHS, Affine, of_widths
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.quant.doubles import DTYPE as DOUBLE
from qwenimg.common.quant.doubles import Doubles
from qwenimg.common.quant.eight_bits import EightBits, format_of
from qwenimg.common.quant.gguf_blocks import READERS, GGUFBlocks
from qwenimg.common.quant.rotated import LARGEST, is_group
from qwenimg.common.weights import comfy
from qwenimg.common.weights.plan import Source

ROTATION = "rotation"  # the end of a tensor's name, U32 [1]: in which groups its layer's rows are rotated
Pieces = dict[str, TensorSlice]  # by the tensor's name, in the order of files and bytes
Expected = Callable[[str], Shape | None]  # returns the shape of the weight with this name, or None


class Grouped(NamedTuple):
    """The weights of files, by the names of their first tensors; and the known tensors that are not used."""

    sources: dict[str, Source]
    unused: frozenset[str]


def grouped(pieces: Pieces, expected: Expected, notes: Mapping[str, str]) -> Grouped:
    """Return every weight of `pieces`, in their order. `notes`: the metadata of the headers. Raises ModelError."""
    comfy.refuse_others(pieces)
    ungrouped = dict(pieces)
    wanted = {name: None for name in ungrouped if expected(name) is not None}
    scaled, unused = comfy.scaled(ungrouped, wanted, notes)
    sources = scaled | _packed(ungrouped, expected, unused) | _float8(ungrouped) | _blocks(ungrouped)
    sources |= {name: Source((piece,), _code_of(piece)) for name, piece in ungrouped.items()}
    return Grouped({name: sources[name] for name in pieces if name in sources}, frozenset(unused))


def _packed(ungrouped: Pieces, expected: Expected, unused: set[str]) -> dict[str, Source]:
    """Return MLX's weights: X.weight U32, X.scales and, for affine codes, X.biases, and of ours X.rotation, whose name
    is added to `unused`.

    The weight's true width tells the code. The file's own statement of it is not needed, and not always there.
    """
    sources = {}
    for name in [name for name, piece in ungrouped.items() if piece.dtype == "U32" and name.endswith(".weight")]:
        codes, shape = ungrouped[name], expected(name)
        if shape is None:
            continue  # unused or unknown: the planner decides
        layer = name.removesuffix(".weight")
        parts = [ungrouped.get(f"{layer}.{part}") for part in ("scales", "biases")]
        scales, biases = parts
        if scales is None:
            raise bad(codes.file.path, f"tensor '{clean(name, 80)}' holds codes (U32) without scales")
        if biases is None:
            sources[name] = Source((codes, scales), _block_float(codes, scales, shape))
        else:
            code = _code(codes, scales, biases, shape)
            if marker := ungrouped.pop(f"{layer}.{ROTATION}", None):
                unused.add(marker.key)
                code = _rotated(code, marker, prod(shape[1:]))
            sources[name] = Source((codes, scales, biases), code)
        for part in sources[name].pieces:
            del ungrouped[part.key]
    return sources


def _code(codes: TensorSlice, scales: TensorSlice, biases: TensorSlice, shape: Shape) -> Affine:
    """Return the code of these tensors. Raises ModelError if they do not fit together, or not a weight of this
    shape."""
    last = [piece.shape[-1] if piece.shape else 0 for piece in (codes, scales)]
    code = of_widths(prod(shape[1:]) if len(shape) > 1 else 0, *last)  # also for a 1x1 kernel
    rows = {codes.shape[:-1], scales.shape[:-1], biases.shape[:-1]}
    same = scales.shape == biases.shape and scales.dtype == biases.dtype and scales.dtype in DTYPES
    if code is None or len(rows) != 1 or not same:
        shapes = " and ".join(str(list(piece.shape)) for piece in (codes, scales, biases))
        raise bad(
            codes.file.path,
            f"tensor '{clean(codes.key, 80)}': codes, scales and biases of {shapes} are no weight {list(shape)} in "
            f"{', '.join(map(str, WIDTHS))} bits by groups of {', '.join(map(str, GROUPS))}",
        )
    return code


def _rotated(code: Affine, marker: TensorSlice, width: int) -> Affine:
    """Return the code of rows of `width` values that are rotated as `marker` says."""
    if marker.dtype != "U32" or marker.shape != (1,):
        shown = clean(f"{marker.dtype} {list(marker.shape)}", 60)
        raise bad(marker.file.path, f"tensor '{clean(marker.key, 80)}' is {shown}: expected U32 [1]")
    (group,) = raw(marker).tolist()
    if not is_group(group) or width % group:
        raise bad(
            marker.file.path,
            f"tensor '{clean(marker.key, 80)}' says groups of {group}: expected a power of 4 up to {LARGEST} that "
            f"divides rows of {width}; convert the original model again",
        )
    return code._replace(rotation=group)


def _block_float(codes: TensorSlice, scales: TensorSlice, shape: Shape) -> BlockFloat:
    """Return the code of these tensors. Raises ModelError if they do not fit together, or not a weight of this
    shape."""
    code = block_float.of_widths(prod(shape[1:]), *(piece.shape[-1] if piece.shape else 0 for piece in (codes, scales)))
    if code is None or codes.shape[:-1] != scales.shape[:-1] or scales.dtype not in block_float.SCALES:
        raise bad(
            codes.file.path,
            f"tensor '{clean(codes.key, 80)}': codes {list(codes.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)} without biases are no weight {list(shape)} in {', '.join(block_float.MODES)}",
        )
    return code


def _float8(ungrouped: Pieces) -> dict[str, Source]:
    """Return weights in plain 8-bit floats, without scales."""
    sources = {}
    for name, piece in list(ungrouped.items()):
        if format := format_of(piece.dtype):
            sources[name] = Source((ungrouped.pop(name),), EightBits(format))
    return sources


def _code_of(piece: TensorSlice) -> Doubles | None:
    """Return the code of a tensor that is a weight by itself; None for numbers that are read as they are."""
    return Doubles() if piece.dtype == DOUBLE else None


def _blocks(ungrouped: Pieces) -> dict[str, Source]:
    """Return weights in GGUF's blocks."""
    names = [name for name, piece in ungrouped.items() if piece.dtype in READERS]
    return {name: Source((piece,), GGUFBlocks(piece.dtype)) for name in names for piece in [ungrouped.pop(name)]}
