"""Folders from which compiled code is loaded: only this user, and root, may be able to put a file there."""

from __future__ import annotations

import atexit
import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

from qwenimg.common.base import leftovers
from qwenimg.common.base.text import shown_path


def make(folder: Path) -> str:
    """Make `folder`, and the missing folders above it, with mode 0700. Return why code must not be kept there, or "".

    A folder is refused if it is a link, belongs to another user, others can write to it or rename it, or the system
    runs no code from it."""
    try:
        missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
        reason = _fault_above(missing[-1] if missing else folder)
        if reason:
            return reason
        for place in reversed(missing):
            place.mkdir(mode=0o700, exist_ok=True)
        return _fault(folder)
    except (OSError, ValueError) as error:
        return f"{shown_path(folder)} cannot be made: {getattr(error, 'strerror', None) or error}"


def temporary(name: str, within: Path | None = None) -> Path:
    """Make an empty folder with mode 0700, in `within` or where temporary files are, for this process alone. It is
    removed when the process ends. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=within))
    leftovers.register(folder)
    atexit.register(leftovers.remove, folder)
    return folder


def _fault(folder: Path) -> str:
    status, shown = folder.lstat(), shown_path(folder)
    if not stat.S_ISDIR(status.st_mode):
        return f"{shown} is a link or a file where a folder is expected: remove it"
    if status.st_uid != os.geteuid():
        return f"{shown} belongs to another user (uid {status.st_uid}): remove it"
    if _is_shared(status):
        return f"others can write to {shown} (mode {status.st_mode & 0o7777:o}): chmod 700 it, or remove it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{shown} cannot be written to (mode {status.st_mode & 0o7777:o}): chmod 700 it"
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # macOS does not say
        return f"{shown} is on a file system without permission to run code (noexec)"
    return ""


def _fault_above(folder: Path) -> str:
    """Return which folder above `folder` would let another user replace a folder on the way to it, or ""."""
    for place in dict.fromkeys([*folder.parents, *Path(os.path.realpath(folder)).parents]):
        status, shown = place.stat(), shown_path(place)
        if status.st_uid not in (0, os.geteuid()):
            return f"{shown} belongs to another user (uid {status.st_uid})"
        if _is_shared(status) and not status.st_mode & stat.S_ISVTX:
            return f"others can write to {shown} (mode {status.st_mode & 0o7777:o}): chmod go-w it"
    return ""


def _is_shared(status: os.stat_result) -> bool:
    """Return whether anyone but the owner may write there. A group whose only member is this user does not count."""
    return bool(status.st_mode & stat.S_IWOTH) or bool(
        status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    )


def _is_own_group(group: int) -> bool:
    try:
        entry, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}
