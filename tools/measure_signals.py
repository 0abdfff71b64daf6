"""How long a signal waits for a handler of Python, and for the thread of `cli/signals.py`, during one long call.

python tools/measure_signals.py

The call is one product in numpy of some seconds, as a step of a large model on a GPU or in MLX is one wait of C++.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

HANDLER = """
import signal
def handle(number, frame): raise SystemExit(143)
signal.signal(signal.SIGTERM, handle)
"""
WAIT = 0.5  # seconds into the call


def product(side: int) -> str:
    """Return the code of a product that lasts seconds, which says when it begins and ends."""
    return (
        f"import numpy as np\na = np.ones(({side}, {side}))\nprint('begun', flush=True)\na @ a\n"
        "print('ended', flush=True)\n"
    )


def side_of(seconds: float) -> int:
    """Return the side of a product that takes about so many seconds here."""
    import numpy as np

    side = 512
    while True:
        a = np.ones((side, side))
        begun = time.monotonic()
        _ = a @ a
        spent = time.monotonic() - begun
        if spent > 0.2:
            return int(side * (seconds / spent) ** (1 / 3))
        side = int(side * 1.5)


def waited(code: str) -> tuple[float, int]:
    """Return the seconds from a SIGTERM within the product of `code` to the end of the process, and its exit code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    time.sleep(WAIT)
    begun = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    code_of = process.wait()
    return time.monotonic() - begun, code_of


def main() -> None:
    """Print how long each way waits."""
    call = product(side_of(6.0))
    indented = "".join(f"    {line}\n" for line in call.splitlines())
    ways = {
        "a handler of Python": HANDLER + call,
        "the thread of cli/signals.py": f"from qwenimg.cli.signals import watched\nwith watched():\n{indented}",
    }
    for name, code in ways.items():
        seconds, exit_code = waited(code)
        print(f"{name}: the process ended {seconds:.2f} s after the signal, exit code {exit_code}")


if __name__ == "__main__":
    main()
