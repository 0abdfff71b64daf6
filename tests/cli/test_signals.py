"""A signal is never swallowed, and which of two counts as the second."""

from __future__ import annotations

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
# Places where Python prints an exception and goes on.
SWALLOWERS = {
    "destructor": f"""
class Eats:
    def __del__(self):
        {SIGTERM}
        sum(range(9))
x = Eats()
del x""",
    "weak reference": f"""
import weakref
class Eats: pass
def call(ref):
    {SIGTERM}
    sum(range(9))
x = Eats()
y = weakref.ref(x, call)
del x""",
    "garbage collector": f"""
import gc
def call(phase, info):
    if phase == "start":
        gc.callbacks.clear()
        {SIGTERM}
        sum(range(9))
gc.callbacks.append(call)
gc.collect()""",
}


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    text = "import os, signal, sys, time\n" + code
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=folder, timeout=HANGS)


@pytest.mark.parametrize("place", SWALLOWERS)
def test_what_was_swallowed_is_raised_again(tmp_path: Path, place: str) -> None:
    body = SWALLOWERS[place].replace("\n", "\n        ")
    ran = run(
        f"""
from qwenimg.cli import signals
with signals.watched() as stop:
    try:
        stop.raises = True
        {body}
        time.sleep(10 * {HANGS})
    except signals.Stopped:
        print("stopped", stop.exit_code)
""",
        tmp_path,
    )
    assert (ran.stdout, ran.stderr) == ("stopped 143\n", ""), ran


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


# The thread that watches


class Ended(Exception):
    """In the place of the end of the process."""


def watch(data: list[int], repeat: float, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The exit code with which the thread ends the process, if it does."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals, "REPEAT", repeat)
    monkeypatch.setattr(signals, "UNWIND", 0)
    monkeypatch.setattr(signals.os, "_exit", end)
    monkeypatch.setattr(signals, "_print", lambda line: None)
    inlet, outlet = os.pipe()
    os.write(outlet, bytes(data))
    os.close(outlet)
    try:
        signals._watch(inlet, Stop(), frozenset({2, 15}))
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


# What is said


def test_how_long_it_may_take() -> None:
    stop = Stop()
    assert stop.words().startswith("stopping; again to stop at once")
    with stop.waits():
        assert "after this step; again to stop at once (no step is done yet" in stop.words()
        stop.step(1, 3, 100.0)
        assert "(in about 100 s: 1 step so far took 100 s)" in stop.words()
        stop.step(2, 3, 200.0)
        assert "(in about 150 s: 2 steps so far took, each, 150 s)" in stop.words()
        stop.step(3, 3, 100.0)
        assert "when this picture is decoded and written" in stop.words()
        stop.picture()
        assert "after this step" in stop.words()
    assert not stop.drawing


def test_a_picture_whose_steps_are_done_is_finished_first() -> None:
    stop = Stop()
    stop.number = signal.SIGTERM
    stop.step(3, 3, 0.1)
    stop.check_step()
    stop.step(2, 3, 0.1)
    with pytest.raises(Stopped):
        stop.check_step()
    with pytest.raises(Stopped):
        stop.picture()
    assert stop.exit_code == 143
