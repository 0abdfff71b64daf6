"""SHA-256 of weight files, by which other programs and model-sharing sites know them.

A large file takes seconds, so its hash is kept on the disk, with the size and the time of change that it had.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path

from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.safe_files import OpenFile

PIECE = 1 << 20  # bytes that are read and hashed at once: few, since no plan of a run counts them
KEPT_FROM = 64 << 20  # bytes: hashes of files of this size or more are kept
MAX_KEPT = 1_000  # files
MAX_NOTES = 1 << 20  # bytes of the file of hashes
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


def sha256(file: OpenFile) -> str:
    """Return the hash of the whole file, 64 hexadecimal digits. The name of a blob in the hub's cache is its hash."""
    real = Path(os.path.realpath(file.path))
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name
    return _kept_hash(file, 0)


def data_sha256(file: OpenFile) -> str:
    """Return the hash of the data of a safetensors file without its header; it does not change with the metadata."""
    return _kept_hash(file, 8 + int.from_bytes(file.read(0, 8), "little"))


def _kept_hash(file: OpenFile, begin: int) -> str:
    """Return the hash of the file's bytes from `begin` on: the kept one if the file has not changed since."""
    if file.size < KEPT_FROM:
        return hashed(file, begin)
    notes, key = _notes(), f"{os.path.realpath(file.path)}:{begin}"
    inode, size, changed = file.identity
    state = f"{inode} {size} {changed} "
    note = notes.get(key)
    if isinstance(note, str) and note.startswith(state) and _SHA256.fullmatch(note.removeprefix(state)):
        return note.removeprefix(state)
    digest = hashed(file, begin)
    notes = {**{name: notes[name] for name in [*notes][-MAX_KEPT + 1 :] if name != key}, key: state + digest}
    _write(notes)
    return digest


def hashed(file: OpenFile, begin: int = 0) -> str:
    """Return the hash of `file` from byte `begin` on, 64 hexadecimal digits. Raises ModelError."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    while begin < file.size:
        part = piece[: file.size - begin]
        file.fill(part, begin)
        digest.update(part)
        begin += len(part)
    return digest.hexdigest()


def notes_file() -> Path:
    """Return the file that keeps hashes, whether or not it exists."""
    from platformdirs import user_cache_path

    return user_cache_path("qwenimg") / "hashes.json"


def _notes() -> dict[str, object]:
    """Return the kept hashes; none if their file is missing or broken."""
    path = notes_file()
    try:
        notes = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_NOTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _write(notes: dict[str, object]) -> None:
    """Keep `notes` if the disk allows it; otherwise the next run hashes again."""
    path = notes_file()
    with suppress(OSError, QwenimgError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(notes).encode(), overwrite=True)
