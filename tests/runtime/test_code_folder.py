"""The folder of torch's compiler: what is there when a process begins is what another one left whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import ENVIRONMENT

from qwenimg.backends.torch import code_folder

HANGS = 600  # seconds after which a process is taken for stuck; no test waits for them
# Takes the folder and prints what is in it and what was told. ADD: a file that is then written there. KILL: it is
# written half, and the process killed. WAIT: what is read from standard input holds up the end.
TAKE = """
import json, os, signal, sys
from pathlib import Path
from qwenimg.backends.torch import code_folder

folder, line = code_folder.take(Path(sys.argv[1]))
there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
print(json.dumps([there, line, folder == Path(sys.argv[1])]), flush=True)
if name := os.environ.get("ADD"):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"whole")
if "KILL" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
if "WAIT" in os.environ:
    sys.stdin.read()
"""


def started(folder: Path, **more: str) -> subprocess.Popen[str]:
    temporary = folder.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | {"TMPDIR": str(temporary)} | more,
    )


def take(folder: Path, **more: str) -> tuple[list[str], str, bool]:
    """What was in the folder, what was told, and whether the folder is that which was named."""
    process = started(folder, **more)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == (-signal.SIGKILL if "KILL" in more else 0) and err == "", err[-2000:]
    assert list((folder.parent / "tmp").iterdir()) == [], "nothing temporary is left"
    there, line, named = json.loads(out)
    return there, line, named


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder in which one process has left a file."""
    folder = tmp_path / "kept"
    assert take(folder, ADD="ab/code.so") == ([], "", True)
    return folder


def test_what_a_process_left_is_there_for_the_next(kept: Path) -> None:
    assert take(kept) == (["ab/code.so", "files.json"], "", True)


def test_what_a_killed_process_left_is_removed(kept: Path) -> None:
    assert take(kept, ADD="ab/half.so", KILL="1")[0] == ["ab/code.so", "files.json"]
    assert (kept / "ab" / "half.so").exists()
    assert take(kept)[0] == ["ab/code.so", "files.json"]
    assert take(kept, ADD="ab/code.so", KILL="1")[0] == ["ab/code.so", "files.json"], "the same bytes are as listed"


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(kept: Path) -> None:
        (kept / "ab" / "code.so").unlink()
        make(kept / "ab" / "code.so")

    return change


FAULTS: dict[str, Callable[[Path], object]] = {
    "truncated": lambda kept: os.truncate(kept / "ab" / "code.so", 3),
    "empty": lambda kept: os.truncate(kept / "ab" / "code.so", 0),
    "other bytes": lambda kept: (kept / "ab" / "code.so").write_bytes(b"wholf"),
    "pipe": replaced(os.mkfifo),
    "folder": replaced(lambda path: (path / "more").mkdir(parents=True)),
    "link": replaced(lambda path: path.symlink_to("/etc/hostname")),
    "no list": lambda kept: (kept / "files.json").unlink(),
    "a list that is a pipe": lambda kept: ((kept / "files.json").unlink(), os.mkfifo(kept / "files.json")),
    "a list that is none": lambda kept: (kept / "files.json").write_text("[" * 100_000),
    "a list of a list": lambda kept: (kept / "files.json").write_text('{"ab/code.so": ["x"]}'),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sample(1)
def test_what_is_not_as_listed_is_removed(kept: Path, fault: str) -> None:
    FAULTS[fault](kept)
    there, line, named = take(kept, ADD="ab/code.so")
    assert (set(there) - {"files.json"}, line, named) == (set(), "", True)
    assert take(kept)[0] == ["ab/code.so", "files.json"]


def test_garbage_is_removed_and_no_link_is_followed(kept: Path) -> None:
    other = kept.parent / "other"
    other.mkdir()
    (other / "mine").write_text("")
    (kept / "link").symlink_to(other)
    (kept / "ab" / "more").mkdir()
    (kept / "ab" / "more" / "garbage").write_text("x")
    assert take(kept)[0] == ["ab/code.so", "files.json"]
    assert (other / "mine").exists() and not (kept / "link").is_symlink()


@pytest.mark.sample(0)
def test_one_process_at_a_time(kept: Path) -> None:
    first = started(kept, WAIT="1")
    assert first.stdout is not None
    first.stdout.readline()
    there, line, named = take(kept, ADD="ab/second.so")
    print(line)
    assert (there, named) == ([], False) and line.endswith("another process is compiling")
    first.communicate("", timeout=HANGS)
    assert first.returncode == 0 and take(kept)[0] == ["ab/code.so", "files.json"]


def test_a_folder_that_is_not_ours_alone_is_not_used(kept: Path) -> None:
    kept.chmod(0o777)
    there, line, named = take(kept)
    assert (there, named) == ([], False) and "others can write to" in line
    kept.chmod(0o700)
    assert take(kept)[0] == ["ab/code.so", "files.json"]


@pytest.mark.sample(0)
def test_where_the_environment_names_a_folder_it_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from qwenimg.backends.torch import compile

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
    monkeypatch.setattr(code_folder, "take", lambda folder: pytest.fail("another folder was named"))
    assert compile.compile(torch.nn.Linear(1, 1), re.compile(""), tmp_path / "kept") == ""
