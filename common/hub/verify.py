"""`pull --verify`: comparison of a model's files with their hashes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from qwenimg.common.base import amounts, hf_cache
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.families import repository
from qwenimg.common.transfer.download import Wanted, digest

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Progress = Callable[[str, int, int], None]


def damaged(files: Sequence[tuple[Path, Wanted]], progress: Progress) -> list[tuple[Path, Wanted]]:
    """Return the files whose hash is not the wanted one. Raises OSError."""
    total, done = sum(wanted.size for _, wanted in files), 0
    known: dict[tuple[str, str], bool] = {}
    wrong = []
    for path, wanted in files:
        key = os.path.realpath(path), wanted.digest
        if key not in known:
            tell = functools.partial(report, progress, f"checking {wanted.path}", done, total)
            known[key] = digest(path, wanted, tell) == wanted.digest
        done += wanted.size
        if not known[key]:
            wrong.append((path, wanted))
    return wrong


def report(progress: Progress, path: str, before: int, total: int, had: int) -> None:
    """Report `had` bytes of the file `path` to `progress`, after `before` bytes of the files before it."""
    progress(path, before + had, total)


def right(files: Sequence[tuple[Path, Wanted]]) -> str:
    count, size = amounts.counted(len(files), "file"), sum(wanted.size for _, wanted in files)
    return f"{count}, {amounts.size_text(size)}: every hash is right"


def verify_offline(repo: str, echo: Callable[[str], None], progress: Progress) -> Path:
    """Check the snapshot of `repo` in the cache by the names of its blobs, which are their hashes, and return its
    folder. Raises ModelError."""
    folder = next((f for f in hf_cache.snapshots(hf_cache.storage_folder(repo)) if repository.lacks(f) is None), None)
    if folder is None:
        raise ModelError(f"{repo}: is not whole in the cache, and cannot be pulled offline")
    try:
        files = [_named(repo, folder, path) for path in repository.used(folder)]
        wrong = damaged(files, progress)
    except OSError as error:
        raise ModelError(f"{repo}: cannot be read: {clean(error.strerror or error, 80)}") from None
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise ModelError(
            f"{repo}: {wrong[0][1].path}{more} is damaged: its hash is not the one that the hub listed; "
            f"with the network on this fetches it again: qwenimg pull --verify {repo}"
        )
    echo(f"{repo}: {right(files)}")
    return folder


def _named(repo: str, folder: Path, path: Path) -> tuple[Path, Wanted]:
    """Return the file at `path` with its wanted hash, which is the name of its blob. Raises ModelError."""
    name = path.relative_to(folder).as_posix()
    blob = path.readlink().name if path.is_symlink() else ""
    if not path.is_file() or not HASH.fullmatch(blob):
        what = "has no hash here, the hub knows it" if path.is_file() else "is missing, or no file"
        raise ModelError(f"{repo}: {name} {what}: verify with the network on")
    return path, Wanted(path=name, size=path.stat().st_size, digest=blob)
