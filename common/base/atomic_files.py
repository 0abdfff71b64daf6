"""Writing of files, complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from qwenimg.common.base import leftovers
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import DoesNotFit, QwenimgError, UsageError, disk_full
from qwenimg.common.base.text import clean, shown_path

PICTURES = (".png", ".jpg", ".jpeg", ".webp")  # the formats that `encode` writes
JPEG = (".jpg", ".jpeg")
DEVICES = ("/dev", "/dev/fd", "/proc")  # no file is written in these folders, nor anywhere below /proc
STALE = 24 * 3600  # seconds after which a temporary file of a dead process is swept
_OUR_TEMP = re.compile(r"\..+\.(\d{1,9})(-\d+)?\.qwenimg\.part", re.DOTALL)


# Writing


def check_output(path: Path, *, overwrite: bool, new_folder: bool = False) -> None:
    """Raise UsageError for a path that `write_atomic` would refuse, before any work is done.

    `new_folder`: the folder of `path` may be missing if its own folder exists, since `make_folder` will make it."""
    shown = shown_path(path)
    folder = path.parent.parent if new_folder and not os.path.lexists(path.parent) else path.parent
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise UsageError(f"{shown}: cannot be written: {_reason(error)}; choose another name") from None
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UsageError(f"{shown}: exists and is not a regular file; choose another name")
    if (place := os.path.abspath(path.parent)) in DEVICES or place.startswith("/proc/"):  # noqa: PTH100
        raise UsageError(f"{shown}: is among devices, where no file is written; choose another folder")
    if mode is not None and not overwrite:
        raise _exists(path)
    if not os.path.isdir(folder):  # noqa: PTH112 (Path.is_dir raises where a folder on the way has no permission)
        raise UsageError(f"{shown}: its folder does not exist; create it or choose another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{shown}: no permission to write in its folder; choose another")


def make_folder(folder: Path, *, parents: bool = False) -> None:
    """Make the last folder of `folder` if it is missing, with `parents` those above it too. Raises UsageError, and
    DoesNotFit for a full disk."""
    try:
        folder.mkdir(exist_ok=True, parents=parents)
    except (OSError, ValueError) as error:
        if disk_full(error):
            raise DoesNotFit(f"{shown_path(folder)}: {_reason(error)}; choose another disk") from None
        raise UsageError(f"{shown_path(folder)}: cannot be made: {_reason(error)}; choose another folder") from None


def write_atomic(path: Path, data: bytes, *, overwrite: bool) -> None:
    """Write `data` as `path`: at any moment, kill -9 included, `path` is the old file (or none) or the whole new one.

    A temporary file in the same folder is written, synced and then renamed. Without `overwrite` it is linked, which
    never replaces a file, not even one that another process made meanwhile. Where the file system has no hard links, an
    empty file claims the name first: kill -9 between the two leaves `path` empty. A symbolic link is replaced, not
    followed.

    Raises UsageError (exists, no permission, no folder, bad name) and DoesNotFit (disk, quota or size limit)."""
    write_parts(path, len(data), [memoryview(data)], overwrite=overwrite)


def write_parts(
    path: Path, size: int, parts: Iterable[memoryview], *, overwrite: bool, check: Callable[[Path], None] | None = None
) -> None:
    """Write `parts`, of `size` bytes together, as `write_atomic` does. check: is called with the path of the whole
    temporary file before it gets its name; what it raises leaves no file."""
    check_output(path, overwrite=overwrite)
    temp = None
    try:
        if size > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd, temp = _open_temp(path)
        with io.FileIO(fd, "w") as file:
            for part in parts:
                rest = part
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(fd)
        if check is not None:
            check(temp)
        _publish(temp, path, overwrite)
        sync_folder(path.parent)
    except OSError as error:
        raise _failure(path, size, error) from None
    finally:
        if temp is not None:
            leftovers.remove(temp)


def check_space(path: Path, size: int) -> None:
    """Check, before any work is done, that `size` bytes can be written in the folder of `path`: allocate and free them,
    so that quotas and limits count too. Raises UsageError and DoesNotFit."""
    temp = None
    try:
        if size > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd, temp = _open_temp(path)
        try:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise _failure(path, size, error) from None
    finally:
        if temp is not None:
            leftovers.remove(temp)


def _open_temp(path: Path) -> tuple[int, Path]:
    """Create a file `.<name>.<pid>.qwenimg.part` in the folder of `path`; `<pid>-1` and so on for threads and reused
    pids."""
    name = os.fsencode(path.name)[:200].decode(errors="ignore")  # a name has at most 255 bytes
    for attempt in itertools.count():
        owner = f"{os.getpid()}-{attempt}" if attempt else str(os.getpid())
        temp = path.with_name(f".{name}.{owner}.qwenimg.part")
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            leftovers.register(temp)
            return descriptor, temp
    raise AssertionError


def _publish(temp: Path, path: Path, overwrite: bool) -> None:
    if overwrite:
        temp.replace(path)
        return
    try:
        os.link(temp, path)
    except FileExistsError:
        raise
    except OSError:  # exFAT, SMB and others have no hard links: claim the name, then rename over our own claim
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            temp.replace(path)
        except BaseException:
            path.unlink()
            raise


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to the disk."""
    with contextlib.suppress(OSError):  # its files are published by now, and some file systems cannot sync a folder
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _reason(error: OSError | ValueError) -> str:
    return clean(getattr(error, "strerror", None) or error, 80)


def _failure(path: Path, size: int, error: OSError) -> QwenimgError:
    shown = shown_path(path)
    if disk_full(error):
        free = f"{shutil.disk_usage(path.parent).free:,} free"
        if error.errno == errno.EFBIG:  # of a process's limit, or a disk like FAT32
            free = "more than `ulimit -f` or this disk allows"
        return DoesNotFit(f"{shown}: {_reason(error)}: {size:,} bytes needed, {free}; choose another disk")
    if error.errno == errno.EEXIST:
        return _exists(path)
    return UsageError(f"{shown}: cannot be written: {_reason(error)}; choose another place")


def _exists(path: Path) -> UsageError:
    return UsageError(f"{shown_path(path)}: exists already; choose another name or pass --overwrite")


def sweep(folder: Path) -> None:
    """Remove temporary files of a killed `write_atomic` from `folder`: a day old, of this user, the process dead."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            match = _OUR_TEMP.fullmatch(entry.name)
            if match and not _is_alive(int(match[1])):
                info = entry.stat(follow_symlinks=False)
                old = info.st_mtime < time.time() - STALE
                if old and stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid():
                    Path(entry.path).unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# Names


def picture_path(path: str | Path) -> Path:
    """Return `path`, with .png if it has no suffix. Raises UsageError for another format, or no name at all."""
    shown = clean(path, 120)
    if not isinstance(path, (str, Path)):
        raise UsageError(f"path is {clean(path, 40)}; expected a file's name")
    if "\0" in str(path):
        raise UsageError(f"{shown!r} is not a file's name")
    file = Path(home(path))
    if file.suffix.lower() not in ("", *PICTURES):
        raise UsageError(f"{shown}: let the name end in one of {' '.join(PICTURES)}")
    if not file.name or str(path).endswith("/"):
        raise UsageError(f"{shown!r} names no file; end it in a name")
    return file if file.suffix else file.with_name(f"{file.name}.png")
