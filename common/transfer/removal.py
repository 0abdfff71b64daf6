"""Removal of a repository from the cache, or of single files of it: what is deleted, and nothing outside.

No link is followed: a link is deleted, and what it leads to stays, unless that is a blob of the same repository that no
other file there leads to.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.hf_cache import MOST_FILES, own_size, stored
from qwenimg.common.base.text import clean, shown_path

SHOWN = 5  # processes that are listed
PROCESSES = Path("/proc")  # where Linux shows the open files of each


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The files to delete in the folder of one repository in the cache."""

    storage: Path
    files: tuple[Path, ...] | None  # None: the whole folder
    bytes: int  # that the disk has more of afterwards
    shared: int  # bytes of files that have another name elsewhere, and stay there

    def processes(self) -> list[str]:
        """Return the processes of this machine that have a file of the repository open, as far as the system tells."""
        return list(islice(_users(os.path.realpath(self.storage) + os.sep), SHOWN))

    def run(self) -> None:
        """Delete the files. Raises UsageError."""
        try:
            if self.files is not None:
                for path in self.files:
                    path.unlink(missing_ok=True)
                if any(True for _ in _files(self.storage / "snapshots")):
                    return
            for place in (self.storage / "refs", self.storage / "snapshots", self.storage):
                _delete(place)  # the names first: what is left after a kill is no model
        except OSError as error:
            where, reason = shown_path(error.filename or self.storage, 120), clean(error.strerror or error, 60)
            raise UsageError(f"{where}: cannot be deleted: {reason}; what is left goes by the same command") from None


def of_repository(storage: Path) -> Removal:
    """Return the removal of a whole repository. Raises ModelError if it is not there, and UsageError for a link."""
    _check(storage)
    shared = sum(_size_elsewhere(path, storage) for path in _files(storage))
    return Removal(storage=storage, files=None, bytes=stored(storage), shared=shared)


def of_files(storage: Path, names: Sequence[str]) -> Removal:
    """Return the removal of files of a repository, with the blobs that only they lead to. Raises as `of_repository`."""
    _check(storage)
    folders = [folder for folder in _entries(storage / "snapshots") if not folder.is_symlink()]
    places = [folder / name for folder in folders for name in names]
    pointers = [path for path in places if os.path.lexists(path) and not path.is_dir() and _is_direct(path, storage)]
    if not pointers:
        raise ModelError(f"{clean(names[0], 100)}: is not in {shown_path(storage, 120)}")
    others = {os.path.realpath(path) for path in _files(storage / "snapshots") if path not in pointers}
    blobs = {Path(os.path.realpath(path)) for path in pointers if path.is_symlink()}
    inside = Path(os.path.realpath(storage / "blobs"))
    freed = [blob for blob in sorted(blobs) if blob.parent == inside and str(blob) not in others and _is_file(blob)]
    files = (*pointers, *freed)
    return Removal(storage=storage, files=files, bytes=sum(map(_size, files)), shared=0)


def _check(storage: Path) -> None:
    if storage.is_symlink():
        raise UsageError(f"{shown_path(storage, 150)}: is a link, and nothing that a link leads to is deleted")
    if not storage.is_dir():
        raise ModelError(f"{shown_path(storage, 150)}: is not there, so there is nothing to delete")


def _is_direct(path: Path, storage: Path) -> bool:
    """Return whether no folder between `storage` and `path` is a link."""
    between = list(path.parents)[: len(path.relative_to(storage).parts) - 1]
    return not any(folder.is_symlink() for folder in between)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files and links below `folder`, no link followed."""
    if folder.is_symlink():
        return
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        yield from (Path(place, name) for name in (*names, *links))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(islice(folder.iterdir(), MOST_FILES)) if not folder.is_symlink() else []
    except OSError:
        return []


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _size(path: Path) -> int:
    return own_size(path) or 0


def _size_elsewhere(path: Path, storage: Path) -> int:
    """Return the bytes of a file that stays: one with another hard link, or where a link leads out of `storage`."""
    try:
        if not path.is_symlink():
            status = path.lstat()
            return status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 else 0
        real = Path(os.path.realpath(path))
        outside = not real.is_relative_to(os.path.realpath(storage))
        return real.stat().st_size if outside and real.is_file() else 0
    except (OSError, ValueError):
        return 0


def _delete(place: Path) -> None:
    if place.is_symlink() or (os.path.lexists(place) and not place.is_dir()):
        place.unlink(missing_ok=True)
    elif place.exists():
        shutil.rmtree(place)  # which follows no link


def _users(prefix: str) -> Iterator[str]:
    """Yield the other processes with an open file whose path begins with `prefix`."""
    for process in _entries(PROCESSES):
        if not process.name.isdecimal() or process.name == str(os.getpid()):
            continue
        try:
            opened = (os.readlink(one) for one in _entries(process / "fd"))  # noqa: PTH115
            if any(path.startswith(prefix) for path in opened) or prefix in (process / "maps").read_text():
                name = (process / "comm").read_text(errors="replace").strip()
                yield f"process {process.name} ({clean(name, 30)}) has files of it open"
        except (OSError, UnicodeError):  # it ended, or is another user's
            continue
