"""A hash of pieces of a model's weights, which tells recipes the weights of an image: hashing all 40 GB of a model
would take a minute.

The hash covers each file's size, the start of its header (64 KiB) and 32 pieces of 4 KiB spread evenly over the file.
Two trainings of one model have different hashes, since training moves every weight; two files that differ in a few
tensors alone can have the same one. The hash tells files apart and proves nothing: it is no protection against a forged
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from qwenimg.common.base.safe_files import OpenFile

HEAD = 64 << 10  # bytes
PIECE = 4 << 10
PIECES = 32


def fingerprint(files: Iterable[OpenFile]) -> str:
    """Return 64 hexadecimal digits for opened weight files, each once and in the order of their names."""
    once: dict[Path, OpenFile] = {file.path: file for file in files}
    whole = hashlib.sha256()
    for path in sorted(once, key=lambda path: path.name):
        file = once[path]
        whole.update(file.size.to_bytes(8, "little"))
        for begin, count in _pieces(file.size):
            whole.update(file.read(begin, count))
    return whole.hexdigest()


def _pieces(size: int) -> list[tuple[int, int]]:
    """Return (begin, bytes) of each piece that is read of a file of `size` bytes."""
    last = max(0, size - PIECE)
    spread = [(last * i // (PIECES - 1), min(size, PIECE)) for i in range(PIECES)]
    return [(0, min(size, HEAD)), *spread]
