"""A file is hashed beside the weights of a run, and so in little memory, whatever its size."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from qwenimg.common.base.safe_files import open_regular
from qwenimg.common.formats.file_hash import hashed
from qwenimg.common.transfer import download

SIZE = (65 << 20) + 3  # more than one read of `safe_files.CHUNK`
MOST = 8 << 20  # bytes; in reads of that size it takes 67 MB
TEXT = b"a header that is not hashed"


def behind_text(path: Path) -> str:
    file = open_regular(path)
    try:
        return hashed(file, len(TEXT))
    finally:
        file.close()


def of_download(path: Path) -> str:
    return download.digest(path, download.Wanted(path="a", size=SIZE, digest="0" * 64))


@pytest.mark.parametrize(("hash_file", "begin"), [(behind_text, len(TEXT)), (of_download, 0)])
def test_hashing_a_large_file_takes_little_memory(tmp_path: Path, hash_file: Callable[[Path], str], begin: int) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(TEXT)
        file.truncate(SIZE)  # zeros that take no room on the disk
    tracemalloc.start()
    found = hash_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expected = hashlib.sha256(TEXT[begin:] + bytes(SIZE - len(TEXT))).hexdigest()
    print(f"{peak / 1e6:.1f} MB")
    assert found == expected and peak < MOST
