"""How fast weights are loaded: two full-width layers of Qwen-Image's transformer, from a file in the page cache.

    python tools/bench_load.py             # writes docs/results/load-cpu.json; then python tools/write_performance.py

Per run and in turn, in one process for each backend and dtype: the file's bytes read into new memory and nothing else
(`file`), a copy from memory to memory that is there already (`memcpy`), and the component opened (`load`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bench
import numpy as np
import random_model
from doc_tables import DOCS

from qwenimg import backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import bases
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.weights import keys

CONFIG = QwenDiTConfig(num_layers=2)
POLICIES = {"F32": bases(KIND)["fp32"], "BF16": bases(KIND)["bf16-plain"]}
Seconds = tuple[float, float]  # of the processor, and by the clock


def timed(act: Callable[[], object]) -> Seconds:
    wall, processor = time.perf_counter(), time.process_time()
    kept = act()
    taken = time.process_time() - processor, time.perf_counter() - wall
    del kept
    return taken


def one(backend: str, dtype: str, path: Path, runs: int) -> dict[str, Any]:
    """The arms of one backend and dtype, in this process."""
    engine, precision = backends.load(backend), POLICIES[dtype]
    plan = keys.plan(path, "transformer", qwen_dit.manifest(CONFIG), uses=qwen_dit.uses).stored(precision)
    spans = [(p.begin, p.end) for e in plan.when(ALWAYS).entries.values() for p in e.source.pieces]
    size = sum(end - begin for begin, end in spans)
    there, copied = (np.full(size // 8, 1.0) for _ in range(2))

    def load() -> object:
        opened = engine.open("qwen_dit", CONFIG, plan, precision)
        engine.release()
        return opened

    with path.open("rb", buffering=0) as file:
        arms: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(copied, there),
            "file": lambda: [os.pread(file.fileno(), end - begin, begin) for begin, end in spans],
            "load": load,
        }
        taken: dict[str, list[Seconds]] = {arm: [] for arm in arms}
        for _ in range(runs + 1):
            for arm, act in arms.items():
                taken[arm].append(timed(act))
                engine.release()
    plan.close()
    processor, wall = ({arm: statistics.median(t[i] for t in ts[1:]) for arm, ts in taken.items()} for i in (0, 1))
    return {"backend": backend, "dtype": dtype, "bytes": size, "processor": processor, "wall": wall}


def all_of(folder: Path, runs: int) -> list[dict[str, Any]]:
    rows = []
    for dtype in POLICIES:
        path = random_model.write(folder / f"{dtype}.safetensors", qwen_dit.manifest(CONFIG), dtype)
        for backend in ("cpu", "mlx"):
            command = [sys.executable, __file__, "--one", backend, dtype, str(path), "--runs", str(runs)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(done.stdout))
            print(rows[-1])
        path.unlink()
    return rows


def main() -> None:
    parser = bench.options(__doc__)
    parser.set_defaults(out=DOCS / "results" / "load-cpu.json")
    parser.add_argument("--one", nargs=3, metavar=("BACKEND", "DTYPE", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        backend, dtype, path = asked.one
        print(json.dumps(one(backend, dtype, Path(path), asked.runs)))
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = all_of(Path(folder), asked.runs)
    result = {
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "mlx": version("mlx")},
        "runs": asked.runs,
        "rows": rows,
        "load_average": before,
        "load_average_after": os.getloadavg()[0],
    }
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
