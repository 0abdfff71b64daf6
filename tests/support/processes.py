"""What tests of several rooms share of `test_end_to_end`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COMMAND = (sys.executable, "-c", "import sys; from qwenimg.cli.main import run; sys.exit(run())")
IMPATIENT = (*COMMAND[:2], "from qwenimg.cli.workers import channel; channel.PAUSE = 0.3; " + COMMAND[2])
"""The command with shorter pauses until a process that does not answer counts as stopped."""

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("QWENIMG_")} | {"HF_HUB_OFFLINE": "1"}


def start(*args: object, cwd: Path, program: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *map(str, args)],
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def qwenimg(*args: object, cwd: Path) -> tuple[int, str, str]:
    process = start(*args, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def listing(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir())
