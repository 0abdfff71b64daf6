"""What the precision of a LoRA's training costs: the built-in model learns the word "hexagon" from 12 pictures in each
precision and each preset of phases, with several seeds.

    python tools/compare_lora.py            # all runs: about 20 minutes of CPU time; those that are recorded stay
    python tools/compare_lora.py --again    # all anew
    python tools/compare_lora.py --tables   # writes the table and the plot again from docs/results/lora-precision.json

Each run is a process of its own, on the CPU. After it the model computes in float32 for all: the loss on noise that is
always the same, of half of the pictures and of three of what it knew, and eight pictures of hexagons, counted by its
own judge. Memory is the highest of the steps above the same process without the denoiser, time that of the processor.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import cpu_model
from doc_tables import DATA, DOCS, table, write

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from qwenimg.common.pictures.charts import Chart, Series, svg
from qwenimg.common.training.config import LoraConfig, describe_phases, memory_estimate, plan_phases

PRECISIONS = ("fp32", "bf16", "fp16", "conservative", "default", "aggressive")
SAME = {"conservative": "fp32"}  # its phases are those of fp32: the same run, bit for bit
FORCED = {"fp16": "full=100:fp16"}  # of a kind of model that is refused in float16 unless a phase names it
SEEDS = (0, 1, 2)
STEPS, BATCH, RATE = 50, 6, 2e-3  # half of a step are pictures of what the model knows
LOOKS = (0, 15, 30, 50)  # steps after which the loss on fixed noise is computed
KNOWN = 24  # pictures of those
RESULT, PLOT = DATA / "lora-precision.json", DOCS / "pictures" / "lora-precision.svg"


# One run, in a process of its own


def child(precision: str, seed: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    from support import hexagons
    from support.training_steps import row_of

    import qwenimg
    from qwenimg.common.training.lora import LoraRun

    told = list[str]()
    with hexagons.known(), qwenimg.load("shapes", backend="cpu", precision="fp32") as pipe:
        learnt, known = hexagons.twelve(pipe), hexagons.old(pipe, KNOWN)
        with tempfile.TemporaryDirectory() as folder:
            config = LoraConfig(
                stem=Path(folder) / "run" / "lora",
                steps=STEPS,
                rate=RATE,
                batch=BATCH,
                seed=seed,
                checkpointing=False,
                precision="fp32" if precision in FORCED else precision,
                shares=FORCED.get(precision),
            )
            run = LoraRun(config, pipe.model, row_of(pipe), learnt, known, told.append)

            def look() -> list[float]:
                run.learner.compute_in("float32")
                return [run.learner.fixed_loss(some) for some in (learnt.examples[::2], known.examples[::8])]

            looks, seconds, peak, back_offs = {0: look()}, 0.0, 0, 0
            pipe.model.residents.drop(run.learner.name)
            idle, steps = _reset(), run.steps()
            for number in range(STEPS):
                run.learner.compute_in(run.loop.dtype(number))
                if number in LOOKS:
                    run.learner.fixed_loss(known.examples[:1])  # opens the denoiser again in the step's dtype
                _reset()
                started = time.process_time()
                done = next(steps)
                seconds += time.process_time() - started
                peak, back_offs = max(peak, _field("VmHWM") - idle), done.back_offs
                if done.step in LOOKS:
                    looks[done.step] = look()
            words = hexagons.learnt(pipe)
            run.close()
    return {
        "losses": {str(step): pair[0] for step, pair in looks.items()},
        "known_losses": {str(step): pair[1] for step, pair in looks.items()},
        "words": words,
        "cpu_seconds_per_step": seconds / STEPS,
        "peak_bytes": peak,
        "back_offs": back_offs,
        "collapsed": any("overflows" in line for line in told),
    }


def _field(name: str) -> int:
    """Return a count of bytes that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines if ":" in line)[name].split()[0]) * 1024


def _reset() -> int:
    """Give freed memory back, forget the highest, and return what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _field("VmRSS")


def spawned(precision: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", precision, str(seed)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=one)
    if ran.returncode:
        raise SystemExit(f"{precision}, seed {seed}: {ran.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# All runs


def measure(again: bool) -> None:
    runs = {} if again or not RESULT.exists() else json.loads(RESULT.read_text())["runs"]
    for seed in SEEDS:
        for precision in PRECISIONS:
            name = f"{precision}-{seed}"
            if precision in SAME or name in runs:
                continue
            runs[name] = {"precision": precision, "seed": seed, **spawned(precision, seed)}
            print(name, json.dumps(runs[name]), flush=True)
            result = {
                "steps": STEPS,
                "batch": BATCH,
                "rate": RATE,
                "machine": f"{platform.system()} {platform.machine()}, one thread",
                "processor": cpu_model(),
                "multiplies": _multiplied(),
                "versions": {"torch": version("torch"), "python": platform.python_version()},
                "runs": runs,
            }
            RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _multiplied() -> list[str]:
    """Return the dtypes of 16 bits in which this processor has instructions for products."""
    import torch

    from qwenimg.backends.torch.ops import multiplies

    return [name for name in ("bfloat16", "float16") if multiplies(getattr(torch, name), "cpu")]


def tables() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    runs = {
        name: some
        for name in PRECISIONS
        if (some := [run for run in result["runs"].values() if run["precision"] == SAME.get(name, name)])
    }
    last = str(result["steps"])
    plain = runs["fp32"]
    rows = [
        [
            f"`{name}`",
            _phases(name, result["steps"]),
            _spread([run["losses"][last] for run in some], "{:.4f}"),
            _spread([run["known_losses"][last] for run in some], "{:.4f}"),
            ", ".join(str(run["words"]) for run in some),
            ", ".join(str(run["seed"]) for run in some),
            f"{statistics.median(run['peak_bytes'] for run in some) / 1e6:.0f} MB",
            f"{memory_estimate(plan_phases(name, result['steps'])):.2f}",
            f"{_mean(some, 'cpu_seconds_per_step') / _mean(plain, 'cpu_seconds_per_step'):.2f}",
            str(sum(run["back_offs"] for run in some)),
        ]
        for name, some in runs.items()
    ]
    heads = [
        "precision", "phases by steps", "loss on fixed noise, hexagons", "of what it knew", "hexagons of 8", "seeds",
        "memory of the steps", "estimate of it, of fp32's mean", "CPU time, of fp32's", "overflows of fp16",
    ]  # fmt: skip
    first = (_spread([run[name]["0"] for run in plain], "{:.4f}") for name in ("losses", "known_losses"))
    before = " and ".join(first)
    about = (
        f"{result['steps']} steps of {result['batch']} pictures, half of them of what the model knows, rank 16, rate "
        f"{result['rate']:g}; of several seeds: mean (least to most). Before the first step the losses are {before}. "
        f"{result['machine']}, torch {result['versions']['torch']}. Processor: {result['processor']}, "
        f"{_instructions(result['multiplies'])}."
    )
    write("measured/training.md", "precisions", f"{table(heads, rows)}\n\n{about}")
    steps = sorted(map(int, plain[0]["losses"]))
    series = [
        Series(name=name, values=[statistics.mean(run["losses"][str(step)] for run in some) for step in steps])
        for name, some in runs.items()
        if name not in SAME
    ]
    title = "loss on fixed noise by step, mean of all seeds"
    PLOT.write_text(svg(Chart(title=title, places=[str(step) for step in steps], series=series)), encoding="utf-8")


def _instructions(dtypes: Sequence[str]) -> str:
    return f"which has {'' if dtypes else 'no '}instructions for products in {' and '.join(dtypes) or '16 bits'}"


def _phases(name: str, steps: int) -> str:
    phases = plan_phases(name, steps)
    dtypes = {phase.dtype for phase in phases}
    return f"all {name}" if len(dtypes) == 1 and name not in SAME else describe_phases(phases)


def _mean(some: Sequence[dict[str, Any]], name: str) -> float:
    return float(statistics.mean(run[name] for run in some))


def _spread(values: Sequence[float], form: str) -> str:
    if len(values) == 1:
        return form.format(values[0])
    mean, least, most = (form.format(one) for one in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--again", action="store_true", help="forget recorded runs")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.child[0], int(args.child[1]))))
        return
    if not args.tables:
        measure(args.again)
    tables()


if __name__ == "__main__":
    main()
