"""The command line in processes of its own: start-up, signals, and standard streams that fail."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

TESTS = Path(__file__).parents[1]
CPU = 0.25  # of what importing torch costs: the most that --help takes; some 0.3 seconds
HANGS = 300  # seconds after which a process that should have ended is taken for stuck; no test waits for them
HEAVY = ("torch", "mlx", "numpy", "PIL", "tokenizers", "huggingface_hub", "safetensors", "tqdm", "platformdirs")

# Runs the command line with a stand-in for the models. STUCK: in which stage it sits in one call into C. GATE: a file
# that the second step of the second picture waits for. REPEAT and LONG: those of `signals`.
SCRIPT = """
import hashlib, os, sys, threading, time
from pathlib import Path

import qwenimg
from qwenimg.cli import signals
from qwenimg.cli.main import run
from qwenimg.common.shapes import builtin

signals.REPEAT = float(os.environ.get("REPEAT", signals.REPEAT))
signals.LONG = float(os.environ.get("LONG", 3600))  # the clock decides nothing

def stuck(stage):
    if os.environ.get("STUCK") == stage:
        ready = threading.Event()
        def tell():
            ready.wait()
            print("stuck", file=sys.stderr, flush=True)
        threading.Thread(target=tell, daemon=True).start()
        sys.setswitchinterval(1000)  # so that it is told when the call has let go of the interpreter
        ready.set()
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)

def opened(opening, notify):
    sys.path.insert(0, os.environ["TESTS"])
    from support.fake_pipeline import FakePipeline

    class Slow(FakePipeline):
        def prepare(self, prompts, clip_skip=0, lora=""):
            stuck("prepare")
        def stream(self, *args, **kwargs):
            stuck("stream")
            for event in super().stream(*args, **kwargs):
                gate = os.environ.get("GATE") if len(self.asked) == 2 and getattr(event, "index", 0) == 2 else None
                if gate:
                    print("at the gate", file=sys.stderr, flush=True)
                while gate and not os.path.exists(gate):
                    time.sleep(0.01)
                yield event

    stuck("load")
    return Slow(notify=notify, pause=float(os.environ["PAUSE"]))

qwenimg.open_pipeline = opened
builtin.folder = lambda: Path(os.devnull)  # no prompt is refused for its words
sys.exit(run())
"""


def environment(pause: float = 0.0, **more: str) -> dict[str, str]:
    return {**os.environ, "TESTS": str(TESTS), "PAUSE": str(pause), **more}


@contextmanager
def started(folder: Path, *args: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return line
    raise AssertionError(f"{text!r} never came")


# Start-up


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from qwenimg.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    spent: dict[str, list[float]] = {code: [], "import torch": []}
    for _ in range(3):  # in turn: other processes on the machine cost both
        for one, seconds in spent.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            ran = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if one == code:
                assert "Usage: qwenimg" in ran.stdout
                assert not {name.partition(".")[0] for name in ran.stderr.split()} & set(HEAVY)
    of_help, of_torch = map(min, spent.values())
    print(f"--help: {of_help:.3f} s CPU, at most {CPU} of importing torch, {of_torch:.3f}")
    assert of_help < CPU * of_torch


def test_errors_of_usage_import_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; from qwenimg.cli.main import run; print(run(['x', '-s', 'y']), *sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout.startswith("2 ") and ran.stderr.startswith("qwenimg: error: seed")
    assert not {name.partition(".")[0] for name in ran.stdout.split()} & {"torch", "mlx", "tokenizers", "PIL"}


@pytest.mark.sample(0)
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
@pytest.mark.sample(0)
def test_a_signal_ends_the_run_after_the_step(tmp_path: Path, number: signal.Signals, code: int) -> None:
    folder, gate = tmp_path / "out", tmp_path / "gate"
    folder.mkdir()
    with started(folder, "x", "-s", "1-3", "-o", "{seed}", GATE=str(gate)) as process:
        wait_for(process, "at the gate")  # within a step: between two of them it ends without a word
        process.send_signal(number)
        wait_for(process, "stopping after this step; again to stop at once")
        gate.touch()
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == code and "Traceback" not in err and "step 3/3" not in err
    assert err.splitlines()[-1].startswith("qwenimg: error: stopped by a signal")
    assert out == f"{folder / '1.png'}\n"
    assert [p.name for p in folder.iterdir()] == ["1.png"] and Image.open(folder / "1.png").size == (20, 12)


@pytest.mark.parametrize("name", ["qwenimg.cli.signals", "qwenimg.cli.streams", "click", "qwenimg.cli.drawing"])
def test_an_early_signal_is_one_line(tmp_path: Path, name: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{name}' and self in sys.meta_path:\n"  # once: it is looked for again for the last line
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from qwenimg.cli.main import run\n"
        "sys.exit(run())"
    )
    ran = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, cwd=tmp_path, timeout=HANGS)
    lines = [line for line in ran.stderr.splitlines() if "again to stop at once" not in line]  # told if it takes long
    assert ran.returncode == 130 and len(lines) == 1 and "stopped by a signal" in lines[0], ran
    assert name == "qwenimg.cli.drawing" or lines == ran.stderr.splitlines(), ran


def test_a_signal_while_the_module_of_temporary_files_is_imported_is_one_line(tmp_path: Path) -> None:
    """It stands among the modules then, without its functions."""
    code = (
        "import sys, types\n"
        "from qwenimg.cli.signals import Stop\n"
        "sys.modules['qwenimg.common.base.leftovers'] = types.ModuleType('leftovers')\n"
        "Stop().end(2)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=HANGS)
    assert ran.returncode == 130 and "stopped by a signal" in ran.stderr and ran.stderr.count("\n") == 1, ran


@pytest.mark.sample(0)
def test_a_signal_is_an_error_event(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with started(tmp_path, "x", "--json", "-s", "1-2", "-o", "{seed}", GATE=str(gate)) as process:
        wait_for(process, "at the gate")
        process.send_signal(signal.SIGINT)
        wait_for(process, "stopping")
        gate.touch()
        out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 130 and '"event": "error", "index": null, "exit": 130' in out.splitlines()[-1]


ENDED = "qwenimg: error: stopped by a signal; the pictures that were done are kept\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stage", ["load", "prepare", "stream"])
@pytest.mark.sample(0)
def test_one_signal_ends_what_lasts_long(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    """It sits in C for hours, where no exception can be raised: in a step, which has no limit here, or before it."""
    with started(tmp_path, "x", "--json", STUCK=stage, LONG="0") as process:
        wait_for(process, "stuck")
        process.send_signal(number)
        out, err = process.communicate(timeout=HANGS)
    code = 130 if number == signal.SIGINT else 143
    assert process.returncode == code and err == ENDED and not list(tmp_path.iterdir())
    assert f'"event": "error", "index": null, "exit": {code}' in out.splitlines()[-1]


@pytest.mark.sample(0)
def test_a_step_that_lasts_as_long_as_those_before_it_is_not_waited_for(tmp_path: Path) -> None:
    with started(tmp_path, "x", "-s", "1-3", "-o", "{seed}", GATE=str(tmp_path / "never"), LONG="0.2") as process:
        wait_for(process, "at the gate")  # the steps before it took 0.25 s each, as the pipeline says
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 143 and err == ENDED
    assert out == f"{tmp_path / '1.png'}\n" and [p.name for p in tmp_path.iterdir()] == ["1.png"]


@pytest.mark.sample(0)
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    with started(tmp_path, "x", STUCK="stream", REPEAT="0") as process:
        wait_for(process, "stuck")
        process.send_signal(signal.SIGTERM)
        wait_for(process, "stopping after this step; again to stop at once")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out, err) == (130, "", ENDED) and not list(tmp_path.iterdir())


@pytest.mark.sample(0)
def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = ["nohup", sys.executable, "-c", SCRIPT, "x", "-s", "1-2", "-o", "{seed}"]
    env = environment(GATE=str(gate))
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, "at the gate")
    process.send_signal(signal.SIGHUP)
    gate.touch()
    process.communicate(timeout=HANGS)
    assert process.returncode == 0 and (tmp_path / "2.png").exists()


# Streams


def shell(folder: Path, line: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `line` in bash with `$RUN` as the command; the exit status is that of the command, not of its readers."""
    script = f'run() {{ "$0" -c "$SCRIPT" "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    env = {**environment(), "SCRIPT": SCRIPT}
    return subprocess.run(
        ["bash", "-c", script, sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("options", [["x"], ["x", "--json"]])
@pytest.mark.sample(0)
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path, options: list[str]) -> None:
    ran = shell(tmp_path, 'run "$@" -s 1-2 -o "{seed}" | true', *options)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.png", "2.png"]


def alike(*options: str) -> Any:
    """A case that writes as another does."""
    return pytest.param(list(options), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [["--help"], ["x", "-o", "-"], alike("completion", "zsh"), alike("info", "a.png")],
)
@pytest.mark.sample(0)
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, options: list[str]) -> None:
    Image.new("RGB", (3, 4)).save(tmp_path / "a.png")
    ran = shell(tmp_path, 'run "$@" | true', *options)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    "options",
    [["x", "-o", "a"], ["x", "--json"], ["--help"], alike("x", "-o", "-"), alike("--version")],
)
@pytest.mark.sample(0)
def test_a_full_standard_output(tmp_path: Path, options: list[str]) -> None:
    ran = shell(tmp_path, 'run "$@" > /dev/full', *options)
    assert ran.returncode == 4 and "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("qwenimg: error: output cannot be written")
    assert (tmp_path / "a.png").exists() == ("a" in options)


@pytest.mark.sample(0)
def test_streams_that_are_closed_or_full(tmp_path: Path) -> None:
    ran = shell(tmp_path, "run x -o a 2> /dev/full && run x -o b >&- && run x -o c 2>&- && run x -o d < /dev/null")
    assert ran.returncode == 0 and ran.stdout.split() == [str(tmp_path / f"{name}.png") for name in "acd"], ran
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png", "c.png", "d.png"]


@pytest.mark.parametrize(
    "line, code",
    [
        ("models > /dev/full", 4),
        ("x > /dev/full 2>&1", 4),
        ("x y 2> /dev/full", 2),
        ("--help 2> /dev/full", 0),
    ],
)
@pytest.mark.sample(1)
def test_what_cannot_be_written_is_not_tried_again_at_the_end(tmp_path: Path, line: str, code: int) -> None:
    """Where Python buffers its output, as it does unless the environment says otherwise, it ended with 120 instead."""
    ran = shell(tmp_path, f"unset PYTHONUNBUFFERED; run {line}")
    assert ran.returncode == code and "Exception ignored" not in ran.stderr, ran


@pytest.mark.sample(0)
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
        assert process.wait(HANGS) == code and text in shown.decode(), shown
        assert b"\x89PNG" not in shown
        if code == 0:
            assert "s/step" in shown.decode() or "step/s" in shown.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux: the other side is closed
        return b""
