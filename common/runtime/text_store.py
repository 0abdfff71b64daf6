"""Encoded prompts on the disk, kept between runs, so that no text encoder is loaded for the same prompt again.

There is a file for each prompt, named by a hash of everything that its states depend on. Files are not trusted: a wrong
one is reported, ignored, and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.atomic_files import make_folder, write_atomic
from qwenimg.common.base.errors import ModelError, QwenimgError
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.text import clean
from qwenimg.common.formats.fingerprint import fingerprint
from qwenimg.common.formats.safetensors import read_header
from qwenimg.common.memory import own_cache

if TYPE_CHECKING:
    import numpy as np

    from qwenimg.common.base.shape import Shape
    from qwenimg.common.weights.plan import LoadPlan

BUDGET = 2**30  # bytes of all files; a prompt of 512 tokens of Qwen-Image takes 7.3 MB
_FORMAT = 1
_SUFFIX = ".safetensors"


def folder() -> Path:
    """Return the folder of stored texts, in this program's own cache."""
    return own_cache.folder() / "prompts"


def key(backend: str, precision: str, plans: Iterable[LoadPlan], asked: object) -> str | None:
    """Return a hash of the weights (their fingerprint), their storage and precision, the backend, and `asked`: the
    tokens and the choice of states. None if LoRAs change a weight: such states are not kept."""
    parts: list[object] = [_FORMAT, backend, precision, asked]
    for plan in plans:
        if any(entry.deltas for entry in plan.entries.values()):
            return None
        storage = hashlib.sha256("".join(f"{n}{e.storage}" for n, e in plan.entries.items()).encode()).hexdigest()
        parts.append([fingerprint(plan.files), storage])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class TextStore:
    """The files in a folder, together at most `budget` bytes: the least recently used ones are removed first."""

    def __init__(self, notify: Callable[[str, str], None], place: Path | None = None, budget: int = BUDGET):
        self.notify, self.budget = notify, budget
        self.place = folder() if place is None else place

    def has(self, name: str | None) -> bool:
        return name is not None and self._path(name).is_file()

    def get(self, name: str | None, shapes: Sequence[Shape]) -> list[np.ndarray] | None:
        """Return the arrays that were put under `name`, float32, or None without a valid file of these shapes."""
        if name is None or not os.path.lexists(path := self._path(name)):
            return None
        try:
            arrays = _read(path, shapes)
        except ModelError as error:
            self.notify("warning", f"{clean(error, 220)}; it is ignored")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return arrays

    def put(self, name: str | None, arrays: Sequence[np.ndarray]) -> None:
        """Store `arrays`, float32. A failure is only reported."""
        data = _written(arrays)
        if name is None or len(data) > self.budget:
            return
        try:
            make_folder(self.place, parents=True)
            self._make_room(len(data))
            write_atomic(self._path(name), data, overwrite=True)
        except (QwenimgError, OSError) as error:
            self.notify("warning", f"--cache-prompts: {clean(error, 220)}")

    def _path(self, name: str) -> Path:
        return self.place / f"{name}{_SUFFIX}"

    def _make_room(self, size: int) -> None:
        files = [(path, path.lstat()) for path in self.place.glob(f"*{_SUFFIX}")]
        files.sort(key=lambda pair: pair[1].st_mtime)
        total = sum(status.st_size for _, status in files) + size
        for path, status in files:
            if total <= self.budget:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                total -= status.st_size


def _written(arrays: Sequence[np.ndarray]) -> bytes:
    """Return a file of `arrays`; in C order, since `save` takes the memory of a transposed one as it lies."""
    from safetensors.numpy import save

    tensors = {str(i): array.astype("<f4", order="C") for i, array in enumerate(arrays)}
    digest = hashlib.sha256(b"".join(array.tobytes() for array in tensors.values())).hexdigest()
    return save(tensors, {"sha256": digest})


def _read(path: Path, shapes: Sequence[Shape]) -> list[np.ndarray]:
    """Read the arrays of `shapes`. Raises ModelError for any file that `_written` would not have written."""
    import numpy as np

    header = read_header(path)
    try:
        tensors = [header.tensors.get(str(i)) for i in range(len(shapes))]
        if len(header.tensors) != len(shapes) or [(one.dtype, one.shape) for one in tensors if one] != [
            ("F32", tuple(shape)) for shape in shapes
        ]:
            raise bad(path, "does not hold the states of this prompt")
        start, size = min(one.begin for one in tensors if one), 4 * sum(prod(shape) for shape in shapes)
        data = header.file.read(start, size)
    finally:
        header.file.close()
    if hashlib.sha256(data).hexdigest() != header.metadata.get("sha256"):
        raise bad(path, "is damaged")
    flat, arrays, at = np.frombuffer(bytearray(data), "<f4"), list[np.ndarray](), 0
    if not np.isfinite(flat).all():
        raise bad(path, "holds values that are not finite")
    for shape in shapes:
        arrays.append(flat[at : at + prod(shape)].reshape(shape))
        at += prod(shape)
    return arrays
