"""A signal is never swallowed, and which of two counts as the second."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qwenimg.cli import signals
from qwenimg.cli.signals import Stop, Stopped

HANGS = 300  # seconds after which a process that should have ended is taken for stuck; no test waits for them
SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
ENDED = "qwenimg: error: stopped by a signal; the pictures that were done are kept\n"
# Places where Python prints an exception and goes on, and one where foreign code does.
SWALLOWERS = {
    "destructor": f"""
class Eats:
    def __del__(self):
        {SIGTERM}
        time.sleep(3600)
x = Eats()
del x""",
    "garbage collector": f"""
import gc
def call(phase, info):
    {SIGTERM}
    time.sleep(3600)
gc.callbacks.append(call)
gc.collect()""",
    "except": f"""
try:
    {SIGTERM}
    time.sleep(3600)
except BaseException:
    time.sleep(3600)""",
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = "import os, signal, sys, time\n" + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=folder, timeout=HANGS)


@pytest.mark.parametrize("place", SWALLOWERS)
def test_nothing_can_swallow_a_signal(tmp_path: Path, place: str) -> None:
    body = SWALLOWERS[place].replace("\n", "\n    ")
    ran = run(f"from qwenimg.cli import signals\nwith signals.watched():\n    {body}", tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (143, "", ENDED), ran


def test_a_signal_while_a_file_is_written_leaves_nothing(tmp_path: Path) -> None:
    """Its temporary file is there, and the system writes it out for hours."""
    ran = run(
        f"""
from pathlib import Path
from qwenimg.cli import signals
from qwenimg.common.base import atomic_files
def fsync(descriptor):
    assert [path.suffix for path in Path().iterdir()] == [".part"]
    {SIGTERM}
    time.sleep(3600)
with signals.watched():
    os.fsync = fsync
    atomic_files.write_atomic(Path("a.png"), bytes(1000), overwrite=False)
""",
        tmp_path,
    )
    assert (ran.returncode, ran.stderr) == (143, ENDED) and list(tmp_path.iterdir()) == []


def test_a_signal_ends_the_processes_that_were_started(tmp_path: Path) -> None:
    """What they hold of ours is closed then: a pipe ends, of which they have the only other end."""
    ran = run(
        f"""
import subprocess
from qwenimg.cli import signals
from qwenimg.common.base import leftovers
with signals.watched(), subprocess.Popen(["sleep", "3600"], text=True) as child, leftovers.running(child):
    {SIGTERM}
    child.wait()
""",
        tmp_path,
    )
    assert (ran.returncode, ran.stderr) == (143, ENDED)


@pytest.mark.parametrize("failing", ["last", "event", "hears", "leftovers"])
@pytest.mark.parametrize("error", ["ValueError('planted')", "SystemExit(9)"])
def test_a_function_that_fails_is_told_and_the_process_ends(tmp_path: Path, failing: str, error: str) -> None:
    """The thread that watches calls it; with the thread the end of the process would be lost."""
    ran = run(
        f"""
from qwenimg.cli import signals
from qwenimg.common.base import leftovers
def fails(*given):
    raise {error}
with signals.watched() as stop:
    if {failing!r} == "leftovers":
        leftovers.remove_all = fails
    else:
        setattr(stop, {failing!r}, fails)
    if {failing!r} == "hears":
        stop.until = float("inf")
    {SIGTERM}
    time.sleep(3600)
""",
        tmp_path,
    )
    kind, _, text = error.partition("(")
    bug = f"qwenimg: error: this is a bug in qwenimg: {kind}: {text.strip(chr(39) + ')')}\n"
    assert ran.returncode == 143 and bug in ran.stderr and ENDED in ran.stderr, ran


def test_an_error_of_another_thread_ends_the_process_though_its_event_fails(tmp_path: Path) -> None:
    ran = run(
        """
import threading
from qwenimg.cli import signals
def fails(*given):
    raise ValueError("planted")
with signals.watched() as stop:
    stop.event = stop.last = fails
    threading.Thread(target=stop.fail, args=(6, "no number")).start()
    time.sleep(3600)
""",
        tmp_path,
    )
    bug = "qwenimg: error: this is a bug in qwenimg: ValueError: planted\n"
    assert (ran.returncode, ran.stderr) == (6, f"{bug}qwenimg: error: no number\n{bug}")


@pytest.mark.parametrize("full", ["1", "2"])
def test_a_reader_that_does_not_read_holds_nothing_up(tmp_path: Path, full: str) -> None:
    """Standard output or error is a pipe that is full."""
    ran = run(
        f"""
from qwenimg.cli import signals
inlet, outlet = os.pipe()
os.set_blocking(outlet, False)
try:
    while os.write(outlet, bytes(4096)):
        pass
except BlockingIOError:
    os.set_blocking(outlet, True)
with signals.watched() as stop:
    stop.event = lambda code, text: b"event"
    os.dup2(outlet, {full})
    {SIGTERM}
    time.sleep(3600)
""",
        tmp_path,
    )
    assert ran.returncode == 143 and (ran.stderr, ran.stdout) == ((ENDED, "") if full == "1" else ("", "event"))


@pytest.mark.parametrize("args", [["--version"], ["samplers"], ["info", "none"]])
def test_a_signal_that_foreign_code_catches_is_the_exit_code(tmp_path: Path, args: list[str]) -> None:
    ran = run(
        f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            try:
                {SIGTERM}
                sum(range(9))
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
from qwenimg.cli.main import run
sys.argv = ["qwenimg", *{args}]
sys.exit(run())
""",
        tmp_path,
    )
    assert ran.returncode == 143 and ran.stderr.splitlines()[-1].startswith("qwenimg: error: stopped by a signal"), ran


def test_ctrl_c_after_the_run_shows_no_traceback(tmp_path: Path) -> None:
    ran = run(
        """
from qwenimg.cli.main import run
sys.argv = ["qwenimg", "--version"]
code = run()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1000)
""",
        tmp_path,
    )
    assert ran.returncode == -signal.SIGINT and ran.stderr == "" and ran.stdout.startswith("qwenimg "), ran


def test_nothing_is_imported_before_the_signals_are_watched(tmp_path: Path) -> None:
    """Of what Python itself has not imported at its start; each would be a place for a traceback."""
    ran = run("before = set(sys.modules); import qwenimg.cli.main; print(*sorted(set(sys.modules) - before))", tmp_path)
    theirs = {name for name in ran.stdout.split() if not name.startswith("qwenimg")}
    assert theirs <= {"__future__"}, theirs


# Which signal does what


class Ended(Exception):
    """In the place of the end of the process."""


def watch(data: list[int], repeat: float, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The exit code with which the thread ends the process, if it does, while a finished picture is written."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals, "REPEAT", repeat)
    monkeypatch.setattr(signals.os, "_exit", end)
    monkeypatch.setattr(signals, "_tell", lambda line: None)
    inlet, outlet = os.pipe()
    os.write(outlet, bytes(data))
    os.close(outlet)
    stop = Stop()
    try:
        with stop.waits():
            stop.step(1, 1, 0.1)
            signals._watch(inlet, stop)
    except Ended as ended:
        return int(ended.args[0])
    finally:
        os.close(inlet)
    return None


@pytest.mark.parametrize(
    ("data", "repeat", "code"),
    [([2], 0, None), ([2, 2], 3600, None), ([2, 2], 0, 130), ([2, 15], 0, 143), ([28, 28, 2, 28], 0, None)],
)
def test_which_signal_is_the_second(
    data: list[int], repeat: float, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch(data, repeat, monkeypatch) == code


def test_how_long_the_main_thread_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    stop = Stop()
    assert stop.patience() == 0 and stop.words() == ""
    with stop.waits(step=9.0):
        assert stop.words() == "stopping after this step; again to stop at once"
        clock[0] += 4
        assert stop.patience() == signals.LONG - 4
        clock[0] += 100
        assert stop.patience() == 0 and stop.words() == "", "it takes longer than was expected"
        stop.step(1, 3, 104.0)
        assert stop.patience() == 0, "as the one before"
        stop.step(3, 3, 1.0)
        assert stop.patience() == math.inf, "decoded and written first"
        assert "when this picture is decoded and written" in stop.words()
        stop.picture()
        assert stop.patience() == signals.LONG
    assert stop.patience() == 0
    with stop.waits(step=3600.0):
        assert stop.patience() == 0
    with stop.waits():
        stop.claim()
        assert stop.patience() == math.inf, "the main thread ends the run"


def test_a_picture_whose_steps_are_done_is_finished_first() -> None:
    stop = Stop()
    stop.number = signal.SIGTERM
    stop.step(3, 3, 0.1)
    with pytest.raises(Stopped):
        stop.step(2, 3, 0.1)
    with pytest.raises(Stopped):
        stop.picture()
    assert stop.exit_code == 143 and stop.patience() == math.inf
