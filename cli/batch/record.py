"""The journal of a batch: a line of JSON for each picture that was drawn or given up."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenimg.cli.batch.tasks import BatchTask
from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import DoesNotFit, UsageError, disk_full
from qwenimg.common.base.text import clean, shown_path

_GLOB = "journal*.jsonl"


@dataclass(frozen=True)
class Known:
    """The pictures of earlier runs, by their keys."""

    done: Mapping[str, str]  # the SHA-256 of the file
    failed: Mapping[str, str]  # the error


class BatchJournal:
    """The journal of one shard, beside the pictures. Only its driver writes it; each line is on the disk when `add`
    returns, and a torn last line of a killed driver is dropped."""

    def __init__(self, folder: Path, shard: tuple[int, int]) -> None:
        """Open the journal in `folder`, which is made if it is missing. Raises UsageError and DoesNotFit."""
        self.folder, self._writing = folder, threading.Lock()
        atomic_files.make_folder(folder, parents=True)
        name = "journal.jsonl" if shard[1] == 1 else f"journal-{shard[0]}-of-{shard[1]}.jsonl"
        try:
            self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            text = "another batch writes there; wait for it, or give another -o"
            raise UsageError(f"{shown_path(folder)}: {text}") from None
        except OSError as error:
            reason = clean(error.strerror or error, 80)
            raise UsageError(f"{shown_path(folder / name)}: cannot be written: {reason}") from None
        whole = _whole_lines((folder / name).read_bytes())
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, 0, os.SEEK_END)
        atomic_files.sync_folder(folder)
        atomic_files.sweep(folder)

    def close(self) -> None:
        os.close(self._file)

    def known(self) -> Known:
        """Return the entries of the journals of all shards, the last one of each key."""
        done: dict[str, str] = {}
        failed: dict[str, str] = {}
        for path in sorted(self.folder.glob(_GLOB)):
            for line in _whole_lines(path.read_bytes()).splitlines():
                row = _row(line)
                if row.get("state") == "done":
                    done[row["key"]] = str(row.get("sha256"))
                    failed.pop(row["key"], None)
                elif row.get("state") == "failed":
                    failed[row["key"]] = str(row.get("error"))
        return Known(done, failed)

    def is_there(self, task: BatchTask, sha256: str) -> bool:
        """Return whether the picture's file is there as the journal says."""
        try:
            return hashlib.sha256((self.folder / task.name).read_bytes()).hexdigest() == sha256
        except OSError:
            return False

    def adopt(self, task: BatchTask) -> bool:
        """Note a file that a killed driver has published and not noted, which is whole; return whether there is one."""
        try:
            data = (self.folder / task.name).read_bytes()
        except FileNotFoundError:
            return False
        self.add(task, "done", sha256=hashlib.sha256(data).hexdigest())
        return True

    def publish(self, task: BatchTask, data: bytes, seconds: float, *, replace: bool) -> None:
        """Write the picture, then its line. A file that another one has published meanwhile stays, unless `replace`.
        Raises UsageError and DoesNotFit."""
        path = self.folder / task.name
        if replace or not path.exists():
            atomic_files.write_atomic(path, data, overwrite=replace)
        else:
            data = path.read_bytes()
        self.add(task, "done", sha256=hashlib.sha256(data).hexdigest(), seconds=round(seconds, 3))

    def add(self, task: BatchTask, state: str, **more: Any) -> None:
        """Add a line. Raises DoesNotFit for a full disk."""
        about = {"key": task.key, "state": state, "file": task.name, "line": task.where, "seed": task.seed}
        data = json.dumps(about | more).encode() + b"\n"
        try:
            with self._writing:
                while data:
                    data = data[os.write(self._file, data) :]
                os.fsync(self._file)
        except OSError as error:
            if disk_full(error):
                raise DoesNotFit(f"{shown_path(self.folder)}: {clean(error.strerror or error, 80)}") from None
            raise


def _whole_lines(raw: bytes) -> bytes:
    return raw[: raw.rfind(b"\n") + 1]


def _row(line: bytes) -> dict[str, Any]:
    """Return the entry of a line; {} for a line that no journal of ours has."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("key"), str) else {}
