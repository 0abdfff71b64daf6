"""Files of unknown origin: open only regular files, read from the one descriptor, parse JSON strictly.

No size, depth or name that a file claims is trusted: each is checked before memory is spent on it.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal, NoReturn

from qwenimg.common.errors import ModelError, UsageError, clean

# A copy of this size stays in the cache; larger reads were slower (5.4 GB/s at 1 MiB, 3.9 GB/s at 8 MiB).
CHUNK = 1 << 20
MAX_DIGITS = 20  # as many as 2**64 has


def bad(path: Path | str, what: str) -> ModelError:
    """The error for `path`: one printable line of at most 280 characters; a long path keeps its end."""
    shown = clean(path, 4096)
    if len(shown) > 120:
        shown = "…" + shown[-119:]
    return ModelError(short(f"{shown}: {what}", 280))


def short(text: object, limit: int) -> str:
    """`clean(text, limit)`."""
    return clean(text, limit)


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenFile:
    """A regular file, held open so that what was checked is what is read."""

    path: Path
    stream: io.FileIO
    identity: tuple[int, int, int]  # inode, bytes, mtime in ns, when it was opened

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity[1]

    def fill(self, view: memoryview, begin: int) -> None:
        """Read `len(view)` bytes at `begin` into `view` (bytes). Raises ModelError when there are fewer."""
        done = 0
        while done < len(view):
            try:
                piece = os.pread(self.stream.fileno(), min(CHUNK, len(view) - done), begin + done)
            except OSError as error:
                raise bad(self.path, f"cannot be read: {error.strerror}") from None
            if not piece:
                raise bad(self.path, f"ended at byte {begin + done}: it was cut short while it was being read")
            view[done : done + len(piece)] = piece
            done += len(piece)

    def read(self, begin: int, count: int) -> bytes:
        """`count` bytes at `begin`. Raises ModelError when there are fewer."""
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

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self.stream.close()


def open_regular(path: Path) -> OpenFile:
    """Open `path` if it is a regular file, without waiting for one that is not. Raises ModelError."""
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


_SPECIAL = "a pipe, device or socket"


def kind(path: Path) -> Literal["file", "folder", "other"] | None:
    """What is at `path`, links followed; None where nothing is.

    Raises ModelError where that cannot be known: a folder on the way without permission, a link that leads to itself.
    (`Path.is_file` raises OSError for some of them, and for a name that is too long to be anything's.)"""
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
    """Whether a regular file is at `path`. Raises ModelError as `kind` does."""
    return kind(path) == "file"


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`. Raises ModelError as `kind` does."""
    return kind(path) == "folder"


def absolute(path: Path) -> Path:
    """`path` from the root, links kept. Raises UsageError where it starts from a working folder that is gone."""
    try:
        return Path(os.path.abspath(path))  # noqa: PTH100 (resolve would follow links)
    except FileNotFoundError:
        raise UsageError(f"{short(path, 120)}: the working folder does not exist any more; cd to another") from None


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


def strict_json(raw: bytes, path: Path | str, *, depth: int, values: int, infinities: bool = False) -> object:
    """`raw` as JSON, or ModelError: UTF-8 without byte order mark, no duplicate key, no NaN, no infinity unless
    `infinities`, integers of at most 20 digits, nested at most `depth` deep, at most about `values` values."""
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise bad(path, "starts with a byte order mark: save it as UTF-8 without one")
    _check_structure(raw, path, depth, values)
    try:
        data: object = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_infinity if infinities else _constant,
        )
    except UnicodeDecodeError as error:
        raise bad(path, f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise bad(path, f"is not JSON ({error.msg}, character {error.pos})") from None
    except ValueError as error:
        raise bad(path, f"is not JSON as expected: {error}") from None
    return data


def _check_structure(raw: bytes, path: Path | str, depth: int, values: int) -> None:
    """Bound nesting and number of values before the parser, which recurses and allocates, sees the text."""
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    crowded = unescaped.count(b'"') > values
    structure = b"" if crowded else re.sub(rb'"[^"]*"', b"", unescaped).translate(None, _NOT_STRUCTURE)
    if crowded or len(structure) > 2 * values:
        raise bad(path, f"holds more values than are allowed (about {values})")
    brackets = structure.translate(None, b",")
    deepest = max(accumulate(1 if b in b"[{" else -1 for b in brackets), default=0)
    if deepest > depth:
        raise bad(path, f"is JSON nested {deepest} deep; at most {depth} is allowed")


_NOT_STRUCTURE = bytes(set(range(256)) - set(b",[]{}"))


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key '{short(twice, 80)}' occurs twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    if digits == "-0":
        raise ValueError("-0 is not an integer")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{short(digits, 30)} is too large")
    return value


def _infinity(name: str) -> float:
    if name == "NaN":
        _constant(name)
    return float(name)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
