"""Files in the Hugging Face cache, which other programs may have laid out.

Nothing is written through a link, no link is followed out of the cache, and nothing there can make us wait: a pipe is
not opened, and a file is looked at before it is read.
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import shown_path

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
SMALL = 4096  # bytes of a note or a ref


def make_folder(cache: Path, folder: Path) -> Path:
    """Make `folder`, which is below `cache`, if it is missing, and return it. Raises UsageError where it or a folder
    above it is a link, and OSError."""
    for place in (folder, *folder.parents):
        if place == cache:
            break
        if place.is_symlink():
            raise UsageError(
                f"{shown_path(place, 150)}: is a link, and nothing is written through links in the cache: "
                f"remove it, or set HF_HUB_CACHE to a folder where it is none"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_inside(cache: Path, path: Path, size: int) -> bool:
    """Return whether `path` is a regular file of `size` bytes that lies in the cache, also through links."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    real, root = os.path.realpath(path), os.path.realpath(cache)
    return stat.S_ISREG(status.st_mode) and status.st_size == size and Path(real).is_relative_to(root)


def own_size(path: Path) -> int | None:
    """Return the bytes of `path` if it is a regular file without another hard link; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else None


def read_small(path: Path) -> bytes:
    """Read a regular file of at most SMALL bytes. Return b"" for anything else."""
    try:
        with io.FileIO(os.open(path, os.O_RDONLY | _OPEN)) as file:
            status = os.fstat(file.fileno())
            return file.readall() if stat.S_ISREG(status.st_mode) and status.st_size <= SMALL else b""
    except OSError:
        return b""


def create(path: Path) -> io.FileIO:
    """Create an empty file at `path`. Whatever had this name, be it a link or a pipe, is removed. Raises OSError."""
    path.unlink(missing_ok=True)
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o666), "wb")


def append(path: Path) -> io.FileIO:
    """Open the file at `path` to write at its end. Raises OSError."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | _OPEN), "ab")


def open_lock(path: Path) -> io.FileIO:
    """Open or create the file to lock. Raises UsageError if `path` is no regular file, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o666)
    except OSError:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise _no_lock(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
    return io.FileIO(descriptor, "rb+")


def _no_lock(path: Path) -> UsageError:
    return UsageError(
        f"{shown_path(path, 150)}: is a link, a pipe or a folder where a lock's file is expected: remove it"
    )
