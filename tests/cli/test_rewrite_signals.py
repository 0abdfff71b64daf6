"""`qwenimg rewrite` as a process that gets Ctrl-C while it writes: what there is of the text is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli_runner import cli
from support.processes import ENVIRONMENT

HANGS = 300  # seconds after which a process that should have ended is taken for stuck; no test waits for them
GATE = 6  # tokens
SCRIPT = f"""
import os, sys, time
from qwenimg.cli import signals
from qwenimg.cli.main import run
from qwenimg.common.parts.texts.writing import Text

signals.LONG = 3600.0  # the clock decides nothing
add = Text.add

def added(text, *given):
    more = add(text, *given)
    if len(text.tokens) == {GATE}:
        print("at the gate", file=sys.stderr, flush=True)
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
    return more

Text.add = added
sys.exit(run())
"""


def asked(folder: Path) -> tuple[str, ...]:
    weights = ("-m", str(folder), "--backend", "cpu", "--precision", "fp32")
    return ("rewrite", "a red cat", *weights, "--limit", "24", "--temperature", "0")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.sample(1)
def test_what_there_is_of_a_text_is_kept(tiny_folder: Path, tmp_path: Path, number: signal.Signals, code: int) -> None:
    whole = cli(*asked(tiny_folder)).out.decode()
    gate = tmp_path / "gate"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *asked(tiny_folder)],
        env=ENVIRONMENT | {"GATE": str(gate)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("at the gate" in line for line in process.stderr)
        process.send_signal(number)
        assert any("again to stop at once" in line for line in process.stderr)
        gate.touch()
        out, err = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.communicate()
    print(repr(out), "of", repr(whole))
    assert process.returncode == code and "Traceback" not in err
    assert err.splitlines()[-1].startswith("qwenimg: error: stopped by a signal")
    assert out.endswith("\n") and 0 < len(out.strip()) < len(whole.strip()) and whole.startswith(out.rstrip("\n"))
