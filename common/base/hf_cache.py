"""The cache of models that huggingface_hub and other programs share: where it is and how it is laid out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType

from qwenimg.common.base.cache_files import read_small
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

# A repository's name, owner/name: the whole text has neither `--` nor `..`, whatever follows it.
REPO = r"(?!.*(?:--|\.\.))[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMED = re.compile(rf"(?P<repo>{REPO})(?P<file>(?:/[\w-][\w.-]*)*)", re.ASCII)


def snapshots(storage: Path) -> list[Path]:
    """List the folders of the revisions in the cache: first that of `main`, then the others, the newest first."""
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


def repo_of(storage: str) -> str:
    """Return the repository whose folder in the cache is called `storage`: the inverse of `storage_folder`."""
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
