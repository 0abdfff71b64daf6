"""`pull --verify`: the files of a model that are here, hashed anew."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from qwenimg.common import hub
from qwenimg.common.download import Wanted, digest
from qwenimg.common.errors import ModelError

HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Progress = Callable[[str, int, int], None]


def damaged(files: Sequence[tuple[Path, Wanted]], progress: Progress) -> list[tuple[Path, Wanted]]:
    """Those of `files` whose bytes have another hash than is wanted. Raises OSError."""
    total, done = sum(wanted.size for _, wanted in files), 0
    known: dict[tuple[str, str], bool] = {}
    found = []
    for path, wanted in files:
        key = os.path.realpath(path), wanted.digest
        if key not in known:
            tell = functools.partial(_report, progress, f"checking {wanted.path}", done, total)
            known[key] = digest(path, wanted, tell) == wanted.digest
        done += wanted.size
        if not known[key]:
            found.append((path, wanted))
    return found


def _report(progress: Progress, path: str, before: int, total: int, had: int) -> None:
    progress(path, before + had, total)


def right(files: Sequence[tuple[Path, Wanted]]) -> str:
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{count}, {hub.size_text(sum(wanted.size for _, wanted in files))}: every hash is right"


def verify_offline(repo: str, folder: Path, echo: Callable[[str], None], progress: Progress) -> None:
    """Checks `folder`, a snapshot in the cache, by the names of its blobs, which are their hashes. Raises ModelError
    and OSError."""
    files = []
    for path in sorted(path for path in folder.rglob("*") if hub.needed(path.relative_to(folder).as_posix())):
        name = path.relative_to(folder).as_posix()
        blob = path.readlink().name if path.is_symlink() else ""
        if not HASH.fullmatch(blob):
            raise ModelError(f"{repo}: {name} has no hash here, the hub knows it: verify with the network on")
        files.append((path, Wanted(path=name, size=path.stat().st_size, digest=blob)))
    wrong = damaged(files, progress)
    if wrong:
        more = f" and {len(wrong) - 1} more" if wrong[1:] else ""
        raise ModelError(
            f"{repo}: {wrong[0][1].path}{more} is damaged: its hash is not the one that the hub listed; "
            f"with the network on this fetches it again: qwenimg pull --verify {repo}"
        )
    echo(f"{repo}: {right(files)}")
