"""Kernels that MLX compiles for a CPU, kept between runs.

MLX loads `$TMPDIR/mlx/VERSION/cpu/libNAME.so` unchecked if it exists, and otherwise has its compiler write it there. So
TMPDIR names a new folder of each process. Kernels of earlier runs are copied into it once they are known to be whole
and to load; the kernels that this process has compiled are kept when it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Lock

import mlx.core as mx

from qwenimg.common.base import atomic_files, leftovers
from qwenimg.common.base.errors import QwenimgError
from qwenimg.common.base.text import shown_path
from qwenimg.common.runtime import compiling, private_folder

_NAME = re.compile(r"lib\w{1,250}\.so", re.ASCII)
_SUFFIX = ".kernel"
_GPU_FOLDER = "MLX_PTX_CACHE_DIR"
_MOST_BYTES = 2**24  # limit of one kernel; usual ones have 20 to 60 kB
_MOST_FILES = 4096
_YOUNG = 60.0  # seconds in which a new folder must be locked


@cache
def kernel_files() -> KernelFiles:
    """Return the kernel files of this process."""
    return KernelFiles(compiling.folder(f"mlx-{mx.__version__}-{platform.machine()}"))


class KernelFiles:
    """The folder of this process, named to MLX by TMPDIR, and the folder that keeps kernels for later runs."""

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        self.folder: Path | None = None  # None until `open`, and if none can be made
        self._keeps = False  # whether kernels are kept for later runs
        self._known: set[str] = set()  # names of kernels that were kept before this run
        self._process = os.getpid()
        self._opening = Lock()

    def open(self) -> str:
        """Make the folder if it does not exist, and copy kept kernels into it. Return what to tell the user, or
        nothing.

        If no folder can be made, `folder` is None, and nothing may be compiled.
        """
        with self._opening:
            if self.folder is not None and self.folder.is_dir():
                return ""
            tempfile.gettempdir()  # the folder of Python's own temporary files, settled by the first call
            reason = private_folder.make(self.kept)
            self._keeps = not reason
            self.folder, fault = _new_folder(None if reason else self.kept)
            if self.folder is not None and self._keeps:
                _sweep(self.kept)
                try:
                    self._copy()
                except OSError as error:  # a full disk, to which a compiler could not write either
                    leftovers.remove(self.folder)
                    self.folder, fault = None, f"kernels of earlier runs cannot be copied: {error.strerror}"
            if self.folder is None:
                return f"nothing is compiled: {fault}"
            os.environ["TMPDIR"] = str(self.folder)
            atexit.register(self.close)
            return f"compiled kernels are not kept for later runs: {reason}" if reason else ""

    def close(self) -> None:
        """Keep the kernels that MLX has compiled and loaded in this process, and remove the folder."""
        if self.folder is None or os.getpid() != self._process:
            return
        if self._keeps:
            for file in _libraries(self.folder).glob("*.so"):
                if file.name not in self._known and _is_loaded(file):
                    with suppress(QwenimgError, OSError):  # then a later run compiles it again
                        _keep(self.kept, file.name, file.read_bytes())
        leftovers.remove(self.folder)

    def _copy(self) -> None:
        """Copy kept kernels that are whole and load. Remove the others, which the compiler makes again."""
        assert self.folder is not None
        self._known.clear()
        folder = _libraries(self.folder)
        folder.mkdir(mode=0o700, parents=True)
        for path in islice(self.kept.glob(f"*{_SUFFIX}"), _MOST_FILES):
            name, library = _read(path)
            if name and _loads(folder / name, library):
                self._known.add(name)
            elif not path.is_dir() or path.is_symlink():
                path.unlink(missing_ok=True)


def ensure() -> None:
    """Make the folder of this process again if it has vanished since `open`."""
    if kernel_files.cache_info().currsize:
        kernel_files().open()


def name_gpu_folder() -> None:
    """Name to MLX's CUDA build a folder of this user for compiled kernels, or one that cannot be made, so that none are
    kept.

    By itself MLX would load them from the folder for temporary files, to which everybody can write.
    """
    folder = compiling.folder(f"mlx-{mx.__version__}-ptx")
    os.environ.setdefault(_GPU_FOLDER, os.devnull + "/none" if private_folder.make(folder) else str(folder))


def _new_folder(within: Path | None) -> tuple[Path | None, str]:
    """Return a new folder for this process, locked while it lives, or None and the reason."""
    try:
        folder = private_folder.temporary("run" if within else "qwenimg", within)
    except OSError as error:
        return None, f"no temporary folder can be made: {error.strerror}"
    reason = private_folder.make(folder)
    if reason or set('"$`\\') & set(str(folder)):  # MLX puts it between quotes into a command of a shell
        return None, reason or f"{shown_path(folder)} cannot be named to a compiler"
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
    return folder, ""


def _libraries(folder: Path) -> Path:
    """Return the folder in which MLX looks for kernels if TMPDIR is `folder`."""
    return folder / "mlx" / mx.__version__ / "cpu"


def _sweep(kept: Path) -> None:
    """Remove folders and files of processes that were killed."""
    atomic_files.sweep(kept)
    for folder in kept.glob("run-*"):
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime < _YOUNG:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _loads(file: Path, library: bytes) -> bool:
    """Write `library` as `file` and load it; remove it if that fails."""
    file.write_bytes(library)
    try:
        ctypes.CDLL(str(file))
    except OSError:  # of another processor or C library
        file.unlink()
        return False
    return True


def _is_loaded(file: Path) -> bool:
    try:
        ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _path(store: Path, name: str) -> Path:
    return store / f"{hashlib.sha256(name.encode()).hexdigest()}{_SUFFIX}"


def _keep(store: Path, name: str, library: bytes) -> None:
    """Write a kept kernel: a hash of the rest, the name, a newline, the library."""
    body = name.encode() + b"\n" + library
    atomic_files.write_atomic(_path(store, name), hashlib.sha256(body).digest() + body, overwrite=True)


def _read(path: Path) -> tuple[str, bytes]:
    """Return name and library of the kept kernel `path`, both empty if `_keep` has not written it."""
    invalid = ("", b"")
    try:
        with io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _MOST_BYTES:
                return invalid
            data = file.readall()
    except OSError:
        return invalid
    digest, body = data[:32], data[32:]
    name, _, library = body.partition(b"\n")
    is_ours = hashlib.sha256(body).digest() == digest and _NAME.fullmatch(name.decode("latin-1"))
    return (name.decode(), library) if is_ours else invalid
