"""The journal of a batch: a line of JSON for each picture that was drawn or given up.

Its folder may be anybody's: only regular files are opened, no link is followed, and a file that is no journal of ours
is refused before a byte of it changes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import DoesNotFit, ModelError, UsageError, disk_full
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.pictures.png import has_batch_key, with_batch_key

MAX_BYTES = 1 << 30  # of a journal, and of a picture that is read again
MAX_LINE = 1 << 16  # bytes
_GLOB = "journal*.jsonl"
_HASH = re.compile("[0-9a-f]{64}")
_BEGIN = b'{"key": "'  # of a line
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class JournalEntries:
    """The pictures of earlier runs, by their keys."""

    done: Mapping[str, str]  # the SHA-256 of the file
    failed: Mapping[str, str]  # the error


class JournalRow(NamedTuple):
    """A line of a journal."""

    key: str
    is_done: bool
    text: str  # the SHA-256 of the file, or the error
    end: int  # its offset in the file


class BatchJournal:
    """The journal of one shard, in the folder of the pictures. Only its driver writes it. Each line is on the disk when
    `add` returns; an incomplete last line of a killed driver is dropped."""

    def __init__(self, folder: Path, shard: tuple[int, int]) -> None:
        """Open the journal in `folder`, and make the folder if it is missing. Raises UsageError, ModelError and
        DoesNotFit."""
        self.folder, self._writing = folder, threading.Lock()
        atomic_files.make_folder(folder, parents=True)
        name = "journal.jsonl" if shard[1] == 1 else f"journal-{shard[0]}-of-{shard[1]}.jsonl"
        self._path = folder / name
        self._file = _open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = max((row.end for row in _rows(self._path)), default=0)
            os.ftruncate(self._file, end)
            os.lseek(self._file, 0, os.SEEK_END)
        except BlockingIOError:
            os.close(self._file)
            text = "another batch writes there; wait for it, or give another -o"
            raise UsageError(f"{shown_path(folder)}: {text}") from None
        except BaseException:
            os.close(self._file)
            raise
        atomic_files.sync_folder(folder)
        atomic_files.sweep(folder)

    def close(self) -> None:
        os.close(self._file)

    def entries(self) -> JournalEntries:
        """Read the journals of all shards: the last entry of each key. Raises UsageError and ModelError."""
        done: dict[str, str] = {}
        failed: dict[str, str] = {}
        for path in sorted(self.folder.glob(_GLOB)):
            for row in _rows(path):
                if row.is_done:
                    done[row.key] = row.text
                    failed.pop(row.key, None)
                else:
                    failed[row.key] = row.text
        return JournalEntries(done, failed)

    def is_intact(self, task: BatchTask, sha256: str) -> bool:
        """Return whether the file of a picture has this hash."""
        data = self._picture(task)
        return data is not None and hashlib.sha256(data).hexdigest() == sha256

    def adopt(self, task: BatchTask) -> bool:
        """Add the missing line for a complete picture that a killed driver wrote, recognised by its key. Return whether
        there was one."""
        data = self._picture(task)
        if data is None or not has_batch_key(data, task.key):
            return False
        self.add(task, "done", sha256=hashlib.sha256(data).hexdigest())
        return True

    def publish(self, task: BatchTask, data: bytes, seconds: float, *, replace: bool) -> None:
        """Write the picture, then its line. Unless `replace`, a file with the same key is kept: another driver wrote it
        meanwhile. Raises UsageError and DoesNotFit."""
        there = None if replace else self._picture(task)
        if there is not None and has_batch_key(there, task.key):
            data = there
        else:
            data = with_batch_key(data, task.key)
            atomic_files.write_atomic(self.folder / task.name, data, overwrite=True)
        self.add(task, "done", sha256=hashlib.sha256(data).hexdigest(), seconds=round(seconds, 3))

    def _picture(self, task: BatchTask) -> bytes | None:
        """Return the bytes of a picture's file; None if it is no regular file."""
        try:
            with os.fdopen(os.open(self.folder / task.name, os.O_RDONLY | _FLAGS), "rb") as file:
                status = os.fstat(file.fileno())
                return file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES else None
        except OSError:
            return None

    def add(self, task: BatchTask, state: str, **more: Any) -> None:
        """Add a line. Raises DoesNotFit if the disk is full, and UsageError for other errors of the disk."""
        about = {"key": task.key, "state": state, "file": task.name, "line": task.job.where, "seed": task.job.seed}
        data = json.dumps(about | more).encode() + b"\n"
        try:
            with self._writing:
                while data:
                    data = data[os.write(self._file, data) :]
                os.fsync(self._file)
        except OSError as error:
            kind = DoesNotFit if disk_full(error) else UsageError
            raise kind(f"{shown_path(self._path)}: cannot be written: {clean(error.strerror or error, 80)}") from None


def _open(path: Path, flags: int) -> int:
    """Open a regular file; links and pipes are refused."""
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        reason = "is a link" if error.errno == errno.ELOOP else clean(error.strerror or error, 80)
        raise _refused(path, reason) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(path, "is a folder, pipe, device or socket")
    return descriptor


def _refused(path: Path, reason: str) -> UsageError:
    return UsageError(f"{shown_path(path)}: cannot be a batch's journal: {reason}; move it away, or give another -o")


def _rows(path: Path) -> Iterator[JournalRow]:
    """Read the complete lines of a journal."""
    with os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_BYTES:
            raise bad(path, f"is larger than any journal of a batch ({MAX_BYTES >> 30} GiB): give another -o")
        number = end = 0
        while line := file.readline(MAX_LINE + 1):
            number, end = number + 1, end + len(line)
            if line.endswith(b"\n"):
                yield _row(line, end, path, number)
            elif len(line) > MAX_LINE or not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                raise _damaged(path, number)  # a killed driver's last line begins like any other


def _row(line: bytes, end: int, path: Path, number: int) -> JournalRow:
    try:
        row = strict_json(line, path, depth=1, values=40)
    except ModelError:
        raise _damaged(path, number) from None
    if isinstance(row, dict) and isinstance(key := row.get("key"), str) and _HASH.fullmatch(key):
        is_done = row.get("state") == "done"
        text = row.get("sha256" if is_done else "error")
        if isinstance(text, str) and (_HASH.fullmatch(text) if is_done else row.get("state") == "failed"):
            return JournalRow(key, is_done, text, end)
    raise _damaged(path, number)


def _damaged(path: Path, number: int) -> ModelError:
    text = "is not of a batch's journal; move the file away: pictures that are whole are found again without it"
    return bad(path, f"line {number} {text}")
