"""Kernels that MLX compiles for a CPU: nothing is loaded but what a run of this user wrote whole, and what is not
right is compiled again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from support.processes import ENVIRONMENT

from qwenimg.backends.mlx import kernel_files

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="MLX compiles for a CPU by g++")

HANGS = 300  # seconds after which a process is taken for stuck; no test waits for them
# Runs a chain of operations as one kernel, and prints what was told and which kernels were known before. VANISH: the
# folder of the process is removed before. FULL: no file may be as long as a kernel.
RUN = """
import json, os, resource, shutil, sys, tempfile
from pathlib import Path
import mlx.core as mx
from qwenimg.backends.mlx import compile
from qwenimg.backends.mlx.kernel_files import kernel_files
from qwenimg.common.runtime import compiling

compiling.folder = lambda name: Path(sys.argv[1])
os.environ["VICTIM"] = str(os.getpid())
mx.set_default_device(mx.cpu)
before = tempfile.gettempdir()
if "FULL" in os.environ:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
line = kernel_files().open()
known = sorted(kernel_files()._known)
assert tempfile.gettempdir() == before
if "VANISH" in os.environ:
    shutil.rmtree(sys.argv[1])
if kernel_files().folder is not None:
    chain = compile.fused(lambda x: mx.sigmoid(x) * x + 1)
    x = mx.arange(4.0)
    with compile.fusing(True):
        made = chain(x)
        mx.eval(made)
    assert float(mx.abs(made - (x / (1 + mx.exp(-x)) + 1)).max()) < 1e-6
print(json.dumps([line, known]))
"""


def started(kept: Path, **more: str) -> subprocess.Popen[str]:
    """A run that keeps its kernels in `kept`; what is temporary is in the folder `tmp` beside it."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "MLX_DISABLE_COMPILE"}
    temporary = kept.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(kept)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"TMPDIR": str(temporary)} | more,
    )


def run(kept: Path, **more: str) -> tuple[str, list[str]]:
    """What was told, and the kernels that were known before."""
    process = started(kept, **more)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and err == "", err[-2000:]
    assert list((kept.parent / "tmp").iterdir()) == [], "nothing temporary is left"
    line, known = json.loads(out)
    return line, known


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one kept kernel."""
    kept = tmp_path_factory.mktemp("original") / "kept"
    assert run(kept) == ("", [])
    (path,) = kept.iterdir()
    assert path.suffix == ".kernel"
    return kept


@pytest.fixture
def kept(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "kept")


def kernel(kept: Path) -> Path:
    (path,) = kept.glob("*.kernel")
    return path


@pytest.mark.sample(0)
def test_a_second_process_finds_what_the_first_compiled(kept: Path) -> None:
    name, _ = kernel_files._read(kernel(kept))
    status = kernel(kept).stat()
    assert run(kept, PATH="/nowhere") == ("", [name]), "without a compiler"
    assert [path.name for path in kept.iterdir()] == [kernel(kept).name] and kernel(kept).stat() == status


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def linked(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def of_another_processor(path: Path) -> None:
    """As one that was kept on another machine which has the same home."""
    name, library = kernel_files._read(path)
    path.unlink()
    kernel_files._keep(path.parent, name, library[:18] + b"\xf7\x00" + library[20:])
    assert kernel_files._read(path)[0] == name


def renamed(path: Path) -> None:
    """A name that would be written elsewhere."""
    body = b"../../../../lib.so\n" + kernel_files._read(path)[1]
    path.write_bytes(hashlib.sha256(body).digest() + body)


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1000),
    "truncated head": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "a bit": flipped,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "huge": lambda path: os.truncate(path, 2**40),
    "pipe": replaced(os.mkfifo),
    "folder": replaced(lambda path: (path / "more").mkdir(parents=True)),
    "link": linked,
    "processor": of_another_processor,
    "name": renamed,
}
if os.geteuid() == 0:
    FAULTS["owner"] = lambda path: os.chown(path, 12345, 12345)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(0)
def test_a_kernel_that_is_not_right_is_compiled_again(kept: Path, fault: str) -> None:
    path, (name, _) = kernel(kept), kernel_files._read(kernel(kept))
    FAULTS[fault](path)
    assert run(kept) == ("", [])
    if fault != "folder":  # which may hold anything, and stays
        assert kernel_files._read(path)[0] == name and run(kept, PATH="/nowhere") == ("", [name])


@pytest.mark.sample(0)
def test_garbage_in_the_folder_changes_nothing(kept: Path) -> None:
    for i in range(300):
        (kept / f"{i}.kernel").write_bytes(bytes([i % 256]) * i)
    os.mkfifo(kept / "pipe.so")
    (kept / "mlx").symlink_to("/")
    line, known = run(kept)
    assert line == "" and len(known) == 1
    assert sorted(path.name for path in kept.iterdir()) == sorted([kernel(kept).name, "mlx", "pipe.so"])


def unlinked(kept: Path) -> None:
    shutil.move(kept, kept.parent / "real")
    kept.symlink_to(kept.parent / "real")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda kept: kept.chmod(0o777), "others can write to"),
        (unlinked, "is a link"),
        (lambda kept: (shutil.rmtree(kept), kept.write_text("")), "is a link or a file"),
    ],
)
@pytest.mark.sample(0)
def test_a_folder_that_is_not_ours_alone_is_not_used(kept: Path, change: Callable[[Path], object], text: str) -> None:
    """Its kernels may be anybody's. One line says so, and the folder of the process is a temporary one."""
    change(kept)
    line, known = run(kept)
    print(line)
    assert line.startswith("compiled kernels are not kept for later runs: ") and text in line and known == []


@pytest.mark.sample(0)
def test_what_lies_among_temporary_files_is_not_loaded(kept: Path) -> None:
    """MLX would load this of its own accord, and fail; or run it, if another user has put a library there."""
    planted = kept.parent / "shared" / "mlx" / mx.__version__ / "cpu" / kernel_files._read(kernel(kept))[0]
    planted.parent.mkdir(parents=True)
    planted.write_bytes(b"no library")
    kept.chmod(0o777)
    line, _ = run(kept, TMPDIR=str(kept.parent / "shared"))
    assert "not kept" in line and [path.name for path in (kept.parent / "shared").iterdir()] == ["mlx"]


def test_where_no_folder_can_be_made_nothing_is_compiled(tmp_path: Path) -> None:
    """MLX would load what is in the folder for temporary files, which is everybody's."""
    (tmp_path / "kept").write_text("")
    quoted, shared = tmp_path / "with $HOME", tmp_path / "shared"
    quoted.mkdir()
    shared.mkdir()
    shared.chmod(0o777)  # others could put another folder in the place of one below
    for temporary in (quoted, shared):
        line, _ = run(tmp_path / "kept", TMPDIR=str(temporary))
        assert line.startswith("nothing is compiled: "), line
        assert list(temporary.iterdir()) == []


def test_where_a_kept_kernel_cannot_be_copied_nothing_is_compiled(kept: Path) -> None:
    """A full disk: the picture is drawn all the same, and the kernel stays for a later run."""
    line, known = run(kept, FULL="1")
    assert line.startswith("nothing is compiled: kernels of earlier runs cannot be copied: ") and known == []
    assert run(kept)[1] != []


@pytest.mark.sample(0)
def test_a_folder_that_vanishes_is_made_again(kept: Path) -> None:
    assert run(kept, VANISH="1")[0] == ""
    assert kernel(kept)


# Processes that are killed, and two at once

KILLS = """#!/bin/sh
[ "$1" = --version ] && exit 0
while [ "$1" != -o ]; do shift; done
printf '\\177ELF half' > "$2"
kill -9 $VICTIM
"""


@pytest.mark.sample(0)
def test_kill_9_while_a_kernel_is_written(tmp_path: Path) -> None:
    compiler, kept = tmp_path / "bin" / "g++", tmp_path / "kept"
    compiler.parent.mkdir()
    compiler.write_text(KILLS)
    compiler.chmod(0o755)
    process = started(kept, PATH=f"{compiler.parent}:{os.environ['PATH']}")
    process.communicate(timeout=HANGS)
    assert process.returncode == -9
    (left,) = kept.iterdir()
    (half,) = left.rglob("*.so")
    assert half.read_bytes() == b"\177ELF half"
    assert run(kept) == ("", []) and left.is_dir(), "it could be in use, as far as its age says"
    os.utime(left, (0, 0))
    assert run(kept)[1] and [path.suffix for path in kept.iterdir()] == [".kernel"]


def test_the_folder_of_a_process_that_lives_is_not_swept(tmp_path: Path) -> None:
    folder, reason = kernel_files._new_folder(tmp_path)
    assert folder is not None and reason == ""
    (tmp_path / "run-dead").mkdir()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    kernel_files._sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.sample(0)
def test_two_processes_at_once(tmp_path: Path) -> None:
    both = [started(tmp_path / "kept") for _ in range(2)]
    ended = [process.communicate(timeout=HANGS) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert len(run(tmp_path / "kept", PATH="/nowhere")[1]) == 1


# The engine


def test_compiling_for_a_cpu_names_the_folder_to_mlx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from qwenimg import backends
    from qwenimg.common.runtime import compiling

    monkeypatch.setenv("TMPDIR", "where it was")
    monkeypatch.setattr(compiling, "folder", lambda name: tmp_path / "kept")
    kernel_files.kernel_files.cache_clear()
    engine, opened = backends.load("mlx"), SimpleNamespace()
    try:
        assert (engine.compile(opened, None, autotune=False), os.environ["TMPDIR"], opened.fuses) == (
            "",
            "where it was",
            False,
        )
        assert (engine.compile(opened, re.compile(""), autotune=False), opened.fuses) == ("", True)
        folder = Path(os.environ["TMPDIR"])
        assert folder.parent == tmp_path / "kept" and engine.compile(opened, re.compile(""), autotune=False) == ""
        assert Path(os.environ["TMPDIR"]) == folder
        kernel_files.kernel_files().close()
        assert not folder.exists()
    finally:
        kernel_files.kernel_files.cache_clear()
        mx.disable_compile()  # as the environment of the tests has it


def test_the_folder_of_the_build_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named only: that build was not run."""
    from qwenimg.common.runtime import compiling

    monkeypatch.setattr(compiling, "folder", lambda name: tmp_path / name)
    name = f"mlx-{mx.__version__}-ptx"
    for fault, folder in ((False, tmp_path / name), (True, Path("/dev/null/none"))):
        monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")  # so that it is put back
        monkeypatch.delenv("MLX_PTX_CACHE_DIR")
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name).chmod(0o777 if fault else 0o700)
        kernel_files.name_gpu_folder()
        assert Path(os.environ["MLX_PTX_CACHE_DIR"]) == folder
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "of the user")
    kernel_files.name_gpu_folder()
    assert os.environ["MLX_PTX_CACHE_DIR"] == "of the user"
