"""Temporary files and folders, and child processes, that this process must remove even if it ends without unwinding."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PATHS: dict[Path, int] = {}  # with the id of the process that made it: a forked child removes nothing of its parent's
_CHILDREN: set[subprocess.Popen[Any]] = set()


def register(path: Path) -> None:
    """Have `remove_all` remove the file or folder `path`."""
    _PATHS[path] = os.getpid()


def remove(path: Path) -> None:
    """Remove `path` with all that is in it, if this process has registered it and it is still there."""
    if _PATHS.pop(path, None) != os.getpid():
        return
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def running(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill `child` when the context ends, or in `remove_all` before that."""
    add(child)
    try:
        yield
    finally:
        end([child])


def add(child: subprocess.Popen[Any]) -> None:
    """Have `remove_all` kill `child`."""
    _CHILDREN.add(child)


def end(children: Iterable[subprocess.Popen[Any]]) -> None:
    """Kill `children` that have not ended."""
    for child in children:
        _CHILDREN.discard(child)
        child.kill()


def remove_all() -> None:
    """Kill every child and remove every path that this process has registered."""
    for child in list(_CHILDREN):
        child.kill()
    for path in list(_PATHS):
        remove(path)
