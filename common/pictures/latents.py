"""Reading and writing of latents in .npy and .safetensors files."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.base.safe_files import OpenFile, bad, open_regular
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.quant.bits import widened

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]

MAX_LATENTS = 1 << 30  # bytes
SUFFIXES = (".npy", ".safetensors")


def join_latents(latents: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Concatenate latents [N, C, h, w] of the same size in order."""
    import numpy as np

    return np.concatenate(list(latents))


def write_latents(path: Path, array: npt.NDArray[Any], *, overwrite: bool) -> None:
    """Write latents [N, C, h, w] as float32: an array in .npy, the tensor `latents` in .safetensors.

    Raises UsageError for another suffix, NumericsError if a value is not finite, and as `write_atomic` does."""
    import numpy as np

    assert array.ndim == 4, array.shape
    kind = kind_of(path)
    values = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(values).all():
        raise NumericsError(f"{shown_path(path)}: not written, the latents have values that are not finite")
    if kind == ".npy":
        out = io.BytesIO()
        np.lib.format.write_array(out, values, allow_pickle=False)
        data = out.getvalue()
    else:
        from safetensors.numpy import save

        data = save({"latents": values})
    atomic_files.write_atomic(path, data, overwrite=overwrite)


def read_latents(path: Path) -> Float32:
    """Read latents [N, C, h, w] as C-contiguous float32, from a file of `write_latents` or in another float format.

    Raises UsageError for another suffix, and ModelError for another content, more than 1 GiB, or values that are not
    finite in float32. Nothing is unpickled; sizes are checked before reading."""
    import numpy as np

    array = _read_npy(path) if kind_of(path) == ".npy" else _read_safetensors(path)
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(values).all():
        raise bad(path, "has values that are not finite in float32")
    return values


def kind_of(path: Path) -> str:
    """Return the suffix of `path`. Raises UsageError unless it is in SUFFIXES."""
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise UsageError(f"{shown_path(path)}: latents are stored as .npy or .safetensors; choose such a name")
    return kind


def _read_npy(path: Path) -> npt.NDArray[Any]:
    with contextlib.closing(open_regular(path)) as file:
        head = io.BytesIO(file.read(0, min(file.size, 1 << 16)))
        try:
            shape, fortran, dtype = _npy_header(head)
        # numpy evaluates the header as a Python literal, which raises many errors; the file is at fault in each.
        except Exception as error:
            raise bad(path, f"is not a .npy file that can be read: {clean(error, 80)}") from None
        if not all(type(side) is int for side in shape):  # numpy takes True for 1
            raise bad(path, f"has shape {clean(shape, 60)}; expected whole numbers")
        if dtype.kind != "f" or dtype.itemsize not in (2, 4, 8):
            raise bad(path, f"has dtype {clean(dtype, 40)}; expected float16, float32 or float64")
        flat = _read_values(file, shape, head.tell(), file.size, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _npy_header(head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    from numpy.lib import format as npy

    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    version = npy.read_magic(head)
    if version not in readers:
        raise ValueError(f"format version {version}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return readers[version](head)


def _read_safetensors(path: Path) -> npt.NDArray[Any]:
    import numpy as np

    header = read_header(path)
    with contextlib.closing(header.file) as file:
        tensor = header.tensors.get("latents")
        if tensor is None:
            raise bad(path, f"has no tensor `latents`, but {clean(', '.join(header.tensors) or 'none', 80)}")
        if tensor.dtype not in ("F32", "F16", "BF16"):
            raise bad(path, f"tensor latents is {tensor.dtype}; expected F32, F16 or BF16")
        dtype = np.dtype({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype])
        flat = _read_values(file, tensor.shape, tensor.begin, tensor.end, dtype)
    if tensor.dtype == "BF16":
        flat = widened(flat)
    return flat.reshape(tensor.shape)


def _read_values(
    file: OpenFile, shape: tuple[int, ...], begin: int, end: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Read the bytes `begin` to `end` as a flat array. Raises ModelError unless they are [N, C, h, w] of `dtype`."""
    import numpy as np

    if len(shape) != 4 or min(shape) < 1:
        raise bad(file.path, f"has shape {clean(shape, 60)}; expected [N, C, h, w]")
    size = prod(shape) * dtype.itemsize
    if size > MAX_LATENTS:
        raise bad(file.path, f"has {clean(size, 40)} bytes of latents; at most {MAX_LATENTS:,} are read")
    if size != end - begin:
        raise bad(file.path, f"is cut short or has more: {size:,} bytes of latents expected, {end - begin:,} found")
    buffer = bytearray(size)
    file.fill(memoryview(buffer), begin)
    file.check_unchanged()
    return np.frombuffer(buffer, dtype)
