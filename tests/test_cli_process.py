"""The command line in processes of its own: start-up, signals, and standard streams that fail."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

TESTS = Path(__file__).parent
CPU = 0.3  # seconds for --help, promised to users; importing torch alone costs four times as much
STEP = 0.2  # seconds of a step here
PROMPT = 3.0  # seconds for a signal to end the process: one step, and a machine that runs other tests
AT_ONCE = 2.0  # seconds for a second signal: a quarter by design, the rest is the machine's
HEAVY = ("torch", "mlx", "numpy", "PIL", "tokenizers", "huggingface_hub", "safetensors", "tqdm", "platformdirs")

# Runs the command line with a stand-in for the models. STUCK: in which stage it sits in one call into C.
SCRIPT = """
import hashlib, os, sys
from pathlib import Path

import qwenimg
from qwenimg.cli.main import run
from qwenimg.common import builtin

def stuck(stage):
    if os.environ.get("STUCK") == stage:
        print("stuck", file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)

def load(model, backend, precision, *, offline, notify, **options):
    sys.path.insert(0, os.environ["TESTS"])
    from fake_pipeline import FakePipeline

    class Slow(FakePipeline):
        def prepare(self, prompts, clip_skip=0):
            stuck("prepare")
        def stream(self, *args, **kwargs):
            stuck("stream")
            return super().stream(*args, **kwargs)

    stuck("load")
    return Slow(notify=notify, pause=float(os.environ["PAUSE"]))

qwenimg.load = load
builtin.folder = lambda: Path(os.devnull)  # no prompt is refused for its words
sys.exit(run())
"""


def environment(pause: float = 0.0, stuck: str = "") -> dict[str, str]:
    return {**os.environ, "TESTS": str(TESTS), "PAUSE": str(pause), "STUCK": stuck}


@contextmanager
def started(folder: Path, *args: str, pause: float = STEP, stuck: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        cwd=folder,
        env=environment(pause, stuck),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} never came")


# Start-up


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from qwenimg.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    spent = []
    for _ in range(3):  # the least of three: other processes on the machine cost caches
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"--help: {min(spent):.3f} s CPU, at most {CPU}")
    assert "Usage: qwenimg" in ran.stdout
    assert not {name.partition(".")[0] for name in ran.stderr.split()} & set(HEAVY)
    assert min(spent) < CPU


def test_errors_of_usage_import_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; from qwenimg.cli.main import run; print(run(['x', '-s', 'y']), *sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.startswith("2 ") and ran.stderr.startswith("qwenimg: error: seed")
    assert not {name.partition(".")[0] for name in ran.stdout.split()} & {"torch", "mlx", "tokenizers", "PIL"}


def test_bytes_that_are_not_text_end_in_one_line(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT, b"a\xff"], capture_output=True, cwd=tmp_path, env=environment())
    assert ran.returncode == 2 and ran.stderr.count(b"\n") == 1 and ran.stderr.startswith(b"qwenimg: error: ")
    latin = {**environment(), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, "info", "\u591c\x1b"], capture_output=True, cwd=tmp_path, env=latin
    )
    assert ran.returncode == 5 and ran.stderr.count(b"\n") == 1 and ran.stderr.isascii() and b"\x1b" not in ran.stderr


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_run_within_a_step(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with started(tmp_path, "x", "-s", "1-3", "-o", "{seed}") as process:
        wait_for(process, "picture 2 of 3")
        wait_for(process, "step 1/3")
        start = time.monotonic()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
        took = time.monotonic() - start
    print(f"{number.name}: {took:.3f} s")
    assert process.returncode == code and took < PROMPT
    assert err.splitlines()[-1].startswith("qwenimg: error: stopped by a signal") and "Traceback" not in err
    assert out == f"{tmp_path / '1.png'}\n"
    assert [p.name for p in tmp_path.iterdir()] == ["1.png"] and Image.open(tmp_path / "1.png").size == (20, 12)


def test_an_early_signal_leaves_no_traceback(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from qwenimg.cli.main import run\n"
        "sys.exit(run())"
    )
    ran = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert ran.returncode == 130 and ran.stderr.count("\n") == 1 and "stopped by a signal" in ran.stderr, ran


def test_a_signal_is_an_error_event(tmp_path: Path) -> None:
    with started(tmp_path, "x", "--json") as process:
        wait_for(process, "cpu on Fake")
        time.sleep(STEP)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and '"event": "error", "index": null, "exit": 130' in out.splitlines()[-1]


@pytest.mark.parametrize("stage", ["load", "prepare", "stream"])
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, stage: str) -> None:
    with started(tmp_path, "x", stuck=stage) as process:
        wait_for(process, "stuck")
        time.sleep(0.2)  # from the line to the call
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the first one over again, as `timeout` sends it
        time.sleep(0.6)
        assert process.poll() is None  # it sits in C, where no exception can be raised
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        took = time.monotonic() - start
    print(f"second SIGINT in {stage}: {took:.3f} s")
    assert process.returncode == 130 and took < AT_ONCE and out == ""
    assert err.splitlines()[-1].startswith("qwenimg: error: stopped") and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", SCRIPT, "x", "-o", "a"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(STEP), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, "step 1/3")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0 and (tmp_path / "a.png").exists()


# Streams


def shell(folder: Path, line: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `line` in bash with `$RUN` as the command; the exit status is that of the command, not of its readers."""
    script = f'run() {{ "$0" -c "$SCRIPT" "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    env = {**environment(), "SCRIPT": SCRIPT}
    return subprocess.run(
        ["bash", "-c", script, sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("options", [["x"], ["x", "--json"]])
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path, options: list[str]) -> None:
    ran = shell(tmp_path, 'run "$@" -s 1-2 -o "{seed}" | true', *options)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.png", "2.png"]


@pytest.mark.parametrize("options", [["--help"], ["x", "-o", "-"], ["completion", "zsh"], ["info", "a.png"]])
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, options: list[str]) -> None:
    Image.new("RGB", (3, 4)).save(tmp_path / "a.png")
    ran = shell(tmp_path, 'run "$@" | true', *options)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("options", [["x", "-o", "a"], ["x", "--json"], ["x", "-o", "-"], ["--help"], ["--version"]])
def test_a_full_standard_output(tmp_path: Path, options: list[str]) -> None:
    ran = shell(tmp_path, 'run "$@" > /dev/full', *options)
    assert ran.returncode == 4 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("qwenimg: error: output cannot be written")
    assert (tmp_path / "a.png").exists() == ("a" in options)


def test_streams_that_are_closed_or_full(tmp_path: Path) -> None:
    ran = shell(tmp_path, "run x -o a 2> /dev/full && run x -o b >&- && run x -o c 2>&- && run x -o d < /dev/null")
    assert ran.returncode == 0 and ran.stdout.split() == [str(tmp_path / f"{name}.png") for name in "acd"], ran
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png", "c.png", "d.png"]


def test_a_terminal_gets_a_bar_and_no_png(tmp_path: Path) -> None:
    for options, code, text in ((["-o", "a"], 0, "2/3"), (["-o", "-"], 2, "terminal")):
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "x", *options],
            cwd=tmp_path,
            env=environment(0.15),
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        while piece := _read(ours):
            shown += piece
        os.close(ours)
        assert process.wait(30) == code and text in shown.decode(), shown
        assert b"\x89PNG" not in shown
        if code == 0:
            assert "s/step" in shown.decode() or "step/s" in shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux: the other side is closed
        return b""
