"""What is around the steps, in processor time: a whole process that draws one picture of the built-in model, and noise.

    git worktree add ../before COMMIT
    python tools/bench_around.py --against ../before       # writes docs/results/around-cpu.json

This source and another checkout of it run in turn, each in processes of its own; the first run of each is not counted.
Noise is compared with torch.randn on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from doc_tables import DOCS

from qwenimg.common.numbers import noise

HERE = Path(__file__).resolve().parent.parent
COMMAND = "import sys; from qwenimg.cli.main import run; sys.exit(run())"
PICTURE = ("generate", "a red circle", "-m", "shapes", "--seed", "1", "-o", "-")


def seconds(checkout: Path, backend: str) -> float:
    """Processor time of one process and of what it starts."""
    leave = {"PYTHONDONTWRITEBYTECODE"}  # compiled source is found again, as where the package is installed
    environment = {k: v for k, v in os.environ.items() if k not in leave} | {"PYTHONPATH": str(checkout / "src")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", COMMAND, *PICTURE, "--backend", backend],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_picture(against: Path, backends: Sequence[str], runs: int) -> list[dict[str, Any]]:
    rows = []
    for backend in backends:
        taken: dict[Path, list[float]] = {against: [], HERE: []}
        for _ in range(runs + 1):
            for checkout, times in taken.items():
                times.append(seconds(checkout, backend))
        before, now = (statistics.median(times[1:]) for times in taken.values())
        what, name = f"first picture of the built-in model ({backend})", f"commit {commit(against)}"
        rows.append({"what": what, "against": name, "seconds": [now, before], "ratio": now / before})
        print(rows[-1])
    return rows


def noise_against_torch(runs: int = 41) -> dict[str, Any]:
    """The noise of a picture of 1664x928 by Qwen-Image."""
    torch.set_num_threads(1)
    shape = (1, 16, 208, 116)
    ours, theirs = [], []
    for seed in range(runs + 1):
        for times, draw in ((ours, noise.normal), (theirs, torch_normal)):
            begin = time.process_time()
            draw(shape, seed)
            times.append(time.process_time() - begin)
    now, before = (statistics.median(times[1:]) for times in (ours, theirs))
    what = f"noise of 1664x928, median of {runs}"
    return {"what": what, "against": "torch.randn", "seconds": [now, before], "ratio": now / before}


def torch_normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="another checkout of this source")
    parser.add_argument("--backends", nargs="+", default=["cpu"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=DOCS / "results" / "around-cpu.json")
    asked = parser.parse_args()
    against = asked.against.resolve()
    result = {
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "mlx": version("mlx")},
        "runs": asked.runs,
        "rows": [*first_picture(against, asked.backends, asked.runs), noise_against_torch()],
        "load_average_after": os.getloadavg()[0],
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
