"""Values of parameters as a plan says: read, decoded, fused with LoRAs or quantized, and checked to be finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, isfinite, prod, sqrt
from typing import TYPE_CHECKING

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.arrays import largest_bits, value
from qwenimg.common.formats.stored import NUMPY, TOO_LARGE, raw, read_checked
from qwenimg.common.quant.affine import Affine, encode
from qwenimg.common.quant.bits import finite, widened
from qwenimg.common.quant.quantized_tensor import QuantizedTensor
from qwenimg.common.quant.rotated import MOST, RotatedInt8, rotated
from qwenimg.common.weights.plan import Delta, Entry, LoadPlan, StaysQuantized
from qwenimg.common.weights.storage import Packed, QuantFormat, rotation_of

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 20  # values of a tensor that are read at once


# Reading


def read(entry: Entry) -> np.ndarray:
    """Return the values of `entry` in `entry.shape`: float32, float16, or uint16 for the bits of bfloat16; float32
    with the fused deltas if it has any. Raises ModelError as `raw` does."""
    import numpy as np

    source = entry.source
    arrays = [raw(piece) for piece in source.pieces]
    if source.code:
        array = source.code.values(arrays).reshape(source.shape)
    else:
        (array,) = arrays
    if source.channels_last:
        array = np.moveaxis(array, -1, 1)
    if source.decode == "last_tap":
        array = array[:, :, -1]
    if source.decode == "transposed":
        array = array.T
    if source.decode == "swapped":
        array = np.roll(array, len(array) // 2, axis=0)
    if source.decode == "widened":
        array = np.pad(array, ((0, 0), (0, entry.shape[1] - array.shape[1])))
    array = np.ascontiguousarray(array).reshape(entry.shape)
    return fused(widened(array), entry.fused) if entry.fused else array


def read_chunks(entry: Entry) -> Iterator[np.ndarray]:
    """Yield the values of `read`, a few rows at a time: a tensor that is used as it is stored is never in memory as
    a whole. Raises ModelError."""
    import numpy as np

    source = entry.source
    if not source.is_plain or entry.fused:
        yield read(entry)
        return
    piece, (height, *row) = source.first, entry.shape or (1,)
    step = max(1, CHUNK // max(1, prod(row)))
    size = prod(row) * np.dtype(NUMPY[piece.dtype]).itemsize
    for start in range(0, height, step):
        end = min(height, start + step)
        begin = piece.begin + start * size
        yield raw(piece._replace(shape=(end - start, *row), begin=begin, end=begin + (end - start) * size))


def fused(weight: np.ndarray, deltas: tuple[Delta, ...]) -> np.ndarray:
    """Return `weight`, float32, with all of `deltas`, each computed from the original weight. Strength 0 changes no
    bit."""
    total = weight
    for delta in deltas:
        if delta.strength:
            added = delta.added(weight)
            added += total  # in place: these are the largest arrays of a load
            total = added
    return total


def read_branch(entry: Entry) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the branch of `entry` as float32 down [R in] and up [out R]: all of its deltas joined along the rank. None
    without deltas. If the layer rotates its input, so is down. Raises ModelError."""
    import numpy as np

    factors = [delta.factors(entry.shape[1]) for delta in entry.branch if delta.strength]
    if not factors:
        return None
    downs, ups = zip(*factors, strict=True)
    down, code = np.concatenate(downs), entry.storage.code if isinstance(entry.storage, Packed) else None
    rotation = 0 if code is None else rotation_of(code)
    return rotated(down, rotation) if rotation else down, np.concatenate(ups, axis=1)


def read_quantized(entry: Entry) -> QuantizedTensor:
    """Return the quantized values of an `entry` with packed storage: the file's own codes if it has them, else
    quantized from its values. Raises ModelError as `raw` does, and if a scale or value is not finite."""
    assert isinstance(entry.storage, Packed)
    code, source = entry.storage.code, entry.source
    stays = source.quant_storage
    if isinstance(source.code, StaysQuantized) and stays and stays.code == code and not entry.fused:
        weight = source.code.quantized_tensor([raw(piece) for piece in source.pieces], entry.shape)
        count = sum(map(_not_finite, _bounds(weight, code)))
        if count:
            raise not_finite(entry, count, 0.0, "")
    elif isinstance(code, Affine):
        weight = encode(_finite_parts(entry), entry.shape, code)
        if any(map(_not_finite, weight.arrays[1:])):
            what = f"tensor '{clean(source.first.key, 80)}' has values too large for {code.bits} bits; leave out -q"
            raise bad(source.first.file.path, what)
    elif isinstance(code, RotatedInt8):
        (values,) = _finite_parts(entry)  # with its fused deltas
        weight = code.encode(values)
    else:
        raise bad(source.first.file.path, f"is in {code.mode}, into which no LoRA can be fused; convert the original")
    largest = _largest(weight, code) if entry.storage.dtype == "float16" else 0.0
    if largest >= TOO_LARGE["float16"]:
        raise not_finite(entry, 0, largest, entry.storage.dtype)
    return weight


def _finite_parts(entry: Entry) -> Iterator[np.ndarray]:
    """Yield the chunks of `read_chunks`. Raises ModelError if a value is not finite."""
    chunks = read_chunks(entry)
    for part in chunks:
        if count := _not_finite(part):
            raise not_finite(entry, count + sum(map(_not_finite, chunks)), 0.0, "")
        yield part


def _bounds(weight: QuantizedTensor, code: QuantFormat) -> list[np.ndarray]:
    """Return numbers that are finite if all values of the weight are."""
    import numpy as np

    if isinstance(code, RotatedInt8):
        with np.errstate(over="ignore", invalid="ignore"):
            return [weight.scales * np.float32(MOST + 1)]
    return weight.arrays[1:] if isinstance(code, Affine) else [code.values(weight.arrays)]


def _not_finite(array: np.ndarray) -> int:
    """Return the number of values that are not finite."""
    return int((~finite(array)).sum())


def _largest(weight: QuantizedTensor, code: QuantFormat) -> float:
    """Return the largest absolute value of the weight. It is decoded only if the ends of the groups do not settle
    it."""
    import numpy as np

    if isinstance(code, Affine):
        scales, biases = (widened(part) for part in weight.arrays[1:])
        bound = float(np.maximum(np.abs(biases), np.abs(biases + (2**code.bits - 1) * scales)).max(initial=0))
        bound *= sqrt(max(1, code.rotation))  # the most that a rotation makes of a value
        if bound < TOO_LARGE["float16"]:
            return bound
    if isinstance(code, RotatedInt8):
        return float(np.abs(_bounds(weight, code)[0]).max(initial=0))
    return float(np.abs(code.values(weight.arrays)).max(initial=0))


# Checks


def check_values(plan: LoadPlan) -> None:
    """Read one tensor after the other. Raises ModelError for the first that is not finite."""
    for entry in plan.entries.values():
        if isinstance(entry.storage, Packed):
            read_quantized(entry)
        else:
            read_finite(entry)


def read_finite(entry: Entry) -> np.ndarray:
    """Return `read(entry)` if every value is finite in the dtype of its storage. Raises ModelError."""
    if entry.source.is_plain and not entry.fused:
        values, largest = read_checked(entry.source.first)
        values = values.reshape(entry.shape)
    else:
        values = read(entry)
        largest = largest_bits(values)
    check_largest(entry, largest, lambda: int((~finite(values)).sum()))
    return values


def check_largest(entry: Entry, bits: int, count: Callable[[], int]) -> None:
    """Check that the largest value of `entry`, with these bits (`largest_bits`), is finite, also in the dtype of its
    storage.

    `count` returns the number of values that are not finite. Raises ModelError.
    """
    largest = value(bits, entry.dtype)
    if not isfinite(largest):
        raise not_finite(entry, count(), 0.0, entry.storage.dtype)
    if largest >= TOO_LARGE.get(entry.storage.dtype, inf):
        raise not_finite(entry, 0, largest, entry.storage.dtype)


def not_finite(entry: Entry, count: int, largest: float, dtype: object) -> ModelError:
    """Return the error for `entry`, which has `count` values that are not finite in its file, or reaches `largest`,
    too large for `dtype`."""
    if count:
        where = f"{clean(entry.source.first.file.path)}: tensor {clean(entry.source.first.key)}"
        return ModelError(f"{where} has {count} non-finite values; the file is damaged, fetch it again")
    return TooLarge(entry, f"reaches {largest:.3g}, too large for {dtype}")


class TooLarge(ModelError):
    """A weight, `entry`, too large for the dtype of its storage. Its part alone determines which dtype holds it."""

    def __init__(self, entry: Entry, what: str):
        path, key = entry.source.first.file.path, clean(entry.source.first.key)
        cure = "auto,vae=fp32 or auto,vae=bf16" if entry.role == "vae" else "bf16 or fp32"
        super().__init__(f"{clean(path)}: tensor {key} {what}; use --precision {cure}")
        self.what = f"{clean(path.name)}: tensor {key} {what}"  # for a recipe, which contains no paths
        self.part, self.entry = entry.role, entry
