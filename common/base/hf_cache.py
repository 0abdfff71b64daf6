"""The cache of models that huggingface_hub and other programs share: where it is, how it is laid out, and its files.

Nothing is written through a link, no link is followed out of the cache, and nothing there can make us wait: a pipe is
not opened, and a file is looked at before it is read.
"""

from __future__ import annotations

import io
import os
import re
import stat
from itertools import islice
from pathlib import Path
from types import ModuleType

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import absolute, is_folder
from qwenimg.common.base.text import clean, shown_path

# A repository's name, owner/name: the whole text has neither `--` nor `..`, whatever follows it.
REPO = r"(?!.*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMED = re.compile(rf"(?P<repo>{REPO})(?P<file>(?:/[\w-][\w.-]*)*)", re.ASCII)
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MOST_FILES = 100_000  # of a repository that are counted
SMALL = 4096  # bytes of a note or a ref


def snapshots(storage: Path) -> list[Path]:
    """List the folders of a repository's revisions in the cache: `main` first, then by age, the newest first."""
    main = read_small(storage / "refs" / "main").decode("ascii", "replace").strip()
    try:
        folders = [f for f in (storage / "snapshots").iterdir() if COMMIT.fullmatch(f.name) and f.is_dir()]
        return sorted(folders, key=lambda f: (f.name != main, -f.stat().st_mtime))
    except OSError:
        return []


def storage_folder(repo: str) -> Path:
    """Return the folder of the cache with the blobs, snapshots and refs of `repo`."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def find_cached(name: str) -> Path | None:
    """Find `owner/name`, its first snapshot, or `owner/name/file` in the cache. Return None where it is not there, or
    `name` has another form."""
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    places = [folder / match["file"].removeprefix("/") for folder in snapshots(storage_folder(match["repo"]))]
    return next((path for path in places if os.path.lexists(path)), None)


def cached_name(path: Path) -> str | None:
    """Return the name by which `find_cached` finds the absolute `path`; None if that is not in a snapshot."""
    for folder in (path, *path.parents):
        storage = folder.parent.parent.name
        if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) and storage.count("--") == 2:
            inside = path.relative_to(folder).as_posix()
            name = f"{repo_of(storage)}/{inside}" if path != folder else repo_of(storage)
            return name if _NAMED.fullmatch(name) else None
    return None


def display_name(path: Path) -> str:
    """Return a readable name of the folder or file `path`: the repository's for a folder in the cache, the model
    folder's for its `transformer` folder, else its own."""
    whole = absolute(path)
    if is_folder(whole) and (cached := cached_name(whole)) is not None:
        return cached
    return "/".join(whole.parts[-2:]) if whole.name == "transformer" else whole.name


def repo_of(storage: str) -> str:
    """Return the repository of the cache folder called `storage`; the inverse of `storage_folder`."""
    return storage.removeprefix("models--").replace("--", "/")


def cache_folder() -> Path:
    """Return the cache of the Hugging Face libraries: HF_HUB_CACHE, else in HF_HOME, else in ~/.cache."""
    return Path(settings().HF_HUB_CACHE)


def settings() -> ModuleType:
    """Return huggingface_hub's constants, read from HF_... variables. Raises UsageError for an unreadable one."""
    try:
        from huggingface_hub import constants
    except ValueError as error:
        raise UsageError(f"an HF_... variable of the environment cannot be read: {clean(error, 120)}") from None
    return constants


def token() -> str | None:
    """Return the token of HF_TOKEN, or of the Hugging Face tools' file, or None. Raises UsageError."""
    from huggingface_hub import get_token

    if settings().HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    file = Path(settings().HF_TOKEN_PATH)
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{clean(file, 150)}: is no file that could hold a token; set HF_TOKEN_PATH to another")
        return get_token()
    except UsageError:  # which is a ValueError
        raise
    except (OSError, ValueError) as error:
        reason = clean(getattr(error, "strerror", None) or error, 80)
        raise UsageError(f"{clean(file, 150)}: the token cannot be read: {reason}") from None


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    return bool(settings().HF_HUB_OFFLINE)


# Files


def make_folder(cache: Path, folder: Path) -> Path:
    """Make `folder`, which is below `cache`, if it is missing, and return it. Raises UsageError where it or a folder
    above it is a link, and OSError."""
    for place in (folder, *folder.parents):
        if place == cache:
            break
        if place.is_symlink():
            raise UsageError(
                f"{shown_path(place, 150)}: is a link, and nothing is written through links in the cache: "
                f"remove it, or set HF_HUB_CACHE to a folder where it is none"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_inside(cache: Path, path: Path, size: int) -> bool:
    """Return whether `path` is a regular file of `size` bytes that lies in the cache, also through links."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    real, root = os.path.realpath(path), os.path.realpath(cache)
    return stat.S_ISREG(status.st_mode) and status.st_size == size and Path(real).is_relative_to(root)


def stored(storage: Path) -> int:
    """Return the bytes on the disk of the files in the folder `storage` of a repository, links not followed."""
    if not storage.is_dir() or storage.is_symlink():
        return 0
    paths = (Path(folder, name) for folder, _, names in os.walk(storage) for name in names)
    return sum(filter(None, map(own_size, islice(paths, MOST_FILES))))


def own_size(path: Path) -> int | None:
    """Return the bytes of `path` if it is a regular file without another hard link; None for anything else."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else None


def read_small(path: Path) -> bytes:
    """Read a regular file of at most SMALL bytes. Return b"" for anything else."""
    try:
        with io.FileIO(os.open(path, os.O_RDONLY | _OPEN)) as file:
            status = os.fstat(file.fileno())
            return file.readall() if stat.S_ISREG(status.st_mode) and status.st_size <= SMALL else b""
    except OSError:
        return b""


def create(path: Path) -> io.FileIO:
    """Create an empty file at `path`. Whatever had this name, be it a link or a pipe, is removed. Raises OSError."""
    path.unlink(missing_ok=True)
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o666), "wb")


def append(path: Path) -> io.FileIO:
    """Open the file at `path` to write at its end. Raises OSError."""
    return io.FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | _OPEN), "ab")


def open_lock(path: Path) -> io.FileIO:
    """Open or create the file to lock. Raises UsageError if `path` is no regular file, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN, 0o666)
    except OSError:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise _no_lock(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_lock(path)
    return io.FileIO(descriptor, "rb+")


def _no_lock(path: Path) -> UsageError:
    return UsageError(
        f"{shown_path(path, 150)}: is a link, a pipe or a folder where a lock's file is expected: remove it"
    )
