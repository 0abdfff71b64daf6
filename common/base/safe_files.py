"""Files of unknown origin: open only regular files, read from the one descriptor, parse JSON strictly.

No size, depth or name that a file claims is trusted: each is checked before memory is spent on it.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean, shown_path

CHUNK = 1 << 26  # bytes of one read; no signal interrupts a read


def bad(path: Path | str, what: str) -> ModelError:
    """Return the error for `path`: one printable line of at most 280 characters; a long path keeps its end."""
    return ModelError(clean(f"{shown_path(path)}: {what}", 280))


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenFile:
    """A regular file, held open so that the file that was checked is the one that is read."""

    path: Path
    stream: io.FileIO
    identity: tuple[int, int, int]  # inode, bytes, mtime in ns, when it was opened

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.identity[1]

    def fill(self, view: memoryview, begin: int) -> None:
        """Read `len(view)` bytes at `begin` into `view` (bytes). Raises ModelError when there are fewer."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self.stream.fileno(), [view[done : done + CHUNK]], begin + done)
            except OSError as error:
                raise bad(self.path, f"cannot be read: {error.strerror}") from None
            if not count:
                raise bad(self.path, f"ended at byte {begin + done}: it was cut short while it was being read")
            done += count

    def read(self, begin: int, count: int) -> bytes:
        """Read `count` bytes at `begin`. Raises ModelError when there are fewer."""
        try:
            whole = os.pread(self.stream.fileno(), count, begin)
        except OSError as error:
            raise bad(self.path, f"cannot be read: {error.strerror}") from None
        if len(whole) == count:  # nearly always; a buffer would be copied
            return whole
        buffer = bytearray(count)
        self.fill(memoryview(buffer), begin)
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise ModelError when the file is no longer the one that was opened."""
        if _identity(os.fstat(self.stream.fileno())) != self.identity:
            raise bad(self.path, "changed while it was being read: run again when nothing writes to it")

    def is_replaced(self) -> bool:
        """Return whether the file at its path was changed, replaced or removed."""
        try:
            return _identity(self.path.stat()) != self.identity
        except OSError:
            return True

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self.stream.close()


def open_regular(path: Path) -> OpenFile:
    """Open `path` if it is a regular file; never wait for a pipe. Raises ModelError."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise bad(path, _why_not(path, error)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise bad(path, f"is {'a folder' if stat.S_ISDIR(status.st_mode) else _SPECIAL}, not a regular file")
    return OpenFile(path=path, stream=io.FileIO(descriptor), identity=_identity(status))


def open_source(source: Path | OpenFile) -> OpenFile:
    """Open the regular file at a path; a file that is open is returned. Raises as `open_regular` does."""
    return source if isinstance(source, OpenFile) else open_regular(source)


class Closable(Protocol):
    """A file, or a reader of files."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(opened: Closable) -> Iterator[None]:
    """Close `opened` if the body raises; else it stays open."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def in_memory(name: str, data: bytes) -> OpenFile:
    """Return `data`, from a request, as an open file that is nowhere on the disk by a name; messages call it `name`."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        descriptor = os.dup(file.fileno())
    return OpenFile(path=Path(name), stream=io.FileIO(descriptor), identity=_identity(os.fstat(descriptor)))


_SPECIAL = "a pipe, device or socket"


def kind(path: Path) -> Literal["file", "folder", "other"] | None:
    """Return the kind of file at `path`, links followed; None where nothing is.

    Raises ModelError where the kind cannot be known: no permission for a folder on the way, a link that leads to
    itself. (`Path.is_file` raises OSError for some of these, and for a name that is too long for any file.)"""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise bad(path, _why_not(path, error)) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def is_file(path: Path) -> bool:
    """Return whether a regular file is at `path`. Raises ModelError as `kind` does."""
    return kind(path) == "file"


def is_folder(path: Path) -> bool:
    """Return whether a folder is at `path`. Raises ModelError as `kind` does."""
    return kind(path) == "folder"


def absolute(path: Path) -> Path:
    """Return `path` from the root, links kept. Raises UsageError if it is relative and the working folder is gone."""
    try:
        return Path(os.path.abspath(path))  # noqa: PTH100 (resolve would follow links)
    except FileNotFoundError:
        raise UsageError(f"{clean(path, 120)}: the working folder does not exist any more; cd to another") from None


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _why_not(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is a link to a file that does not exist" if os.path.lexists(path) else "does not exist"
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        return f"is {_SPECIAL}, not a regular file"
    if isinstance(error, OSError):
        return f"cannot be opened: {error.strerror}"
    return "cannot be opened: its name holds a null byte"
