"""One signal ends a real run at once where a step is not waited for, on both backends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import ENVIRONMENT

HANGS = 300  # seconds after which a process that should have ended is taken for stuck; no test waits for them
RUN = "import sys; from qwenimg.cli import main, signals; signals.LONG = 0; sys.exit(main.run())"


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(
    ("line", "number", "code"),
    [("loading text encoder", signal.SIGINT, 130), ("loading transformer", signal.SIGTERM, 143)],
)
@pytest.mark.sample(1)
def test_a_signal_ends_a_run_at_once(tmp_path: Path, backend: str, line: str, number: signal.Signals, code: int):
    options = ["-m", "shapes", "--backend", backend, "--size", "1024x1024", "--steps", "1000", "-o", "a.png"]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, "a red circle", *options],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any(told.startswith(line) for told in process.stderr)
        process.send_signal(number)
        out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out) == (code, "") and "\nstep " not in err
    assert err.splitlines()[-1].startswith("qwenimg: error: stopped by a signal") and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
