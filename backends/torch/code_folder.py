"""The folder in which torch's compiler keeps its code between runs.

torch loads a library or a module from it unchecked, and writes libraries in place: after kill -9 half a library may
remain, which ends every later run. So a process writes a list of all files with their hashes when it ends, and the next
one removes what does not match the list before it begins. One process at a time uses the folder.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.text import shown_path
from qwenimg.common.runtime import private_folder

_LIST = "files.json"


def take(folder: Path) -> tuple[Path, str]:
    """Check and lock `folder` for this process. Return it and "", or a temporary folder and a line for the user. Raises
    OSError."""
    reason = private_folder.make(folder) or _lock(folder)
    if reason:
        return private_folder.temporary("qwenimg"), f"compiled code is not kept for later runs: {reason}"
    _clean(folder)
    atexit.register(_write_list, folder, os.getpid())
    return folder, ""


def _lock(folder: Path) -> str:
    """Lock `folder` while this process lives. Return why that is not possible, or nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        used = isinstance(error, BlockingIOError)
        return "another process is compiling" if used else f"{shown_path(folder)} cannot be locked: {error.strerror}"
    return ""


def _clean(folder: Path) -> None:
    """Remove everything but folders and the files that match the list."""
    listed = _read_list(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            if stat.S_ISDIR(mode) and name not in listed:
                continue
            if not stat.S_ISREG(mode) or (name != _LIST and listed.get(name) != _hash(path)):
                _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _hash(path: Path) -> str:
    """Return the SHA-256 of a regular file, empty where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def _read_list(folder: Path) -> dict[str, str]:
    path = folder / _LIST
    try:
        listed = json.loads(path.read_bytes()) if stat.S_ISREG(path.lstat().st_mode) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return listed if isinstance(listed, dict) else {}


def _write_list(folder: Path, process: int) -> None:
    """List the files that the process of that id has left in `folder`; do nothing in a forked child."""
    if os.getpid() != process:
        return
    paths = [Path(place, name) for place, _, files in os.walk(folder) for name in files if name != _LIST]
    hashes = {path.relative_to(folder).as_posix(): _hash(path) for path in paths if path.is_file()}
    listed = {name: digest for name, digest in hashes.items() if digest}
    with suppress(QwenimgError, OSError):  # then the next process compiles again
        atomic_files.write_atomic(folder / _LIST, json.dumps(listed).encode(), overwrite=True)
