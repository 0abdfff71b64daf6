"""Trains three sizes of the built-in model in four precisions for a few hundred steps, and writes what each costs.

    python tools/compare_training.py           # trains: about 9 minutes on one idle core; writes the table
    python tools/compare_training.py --tables  # writes the table of docs/shapes.md again

Every run is a process of its own, so that its peak of memory is its own; what a process takes before its first step is
given beside it. All sizes learn with one VAE, trained for a few steps: the loss of the transformer is what is compared.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from doc_tables import DOCS, table, write
from training.config import RATES, ModelSize, ShapesConfig

RESULT = DOCS / "results" / "training-cpu.json"
SIZES = {
    "64 x 3": ModelSize(heads=2, layers=3, text_hidden=64, text_intermediate=128),
    "96 x 4": ModelSize(heads=3, layers=4, text_hidden=96, text_intermediate=192, text_heads=4),
    "128 x 6": ModelSize(),
}
"""Width and blocks of the transformer; the last is the one that ships."""
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "phased": "default"}
STEPS = 200
BATCH, PICTURE, SEED = 2, (64, 64), 0
VAE_STEPS = 40
LAST = 50  # steps over which the final loss is the mean


# One run, in a process of its own


def child(options: dict[str, Any]) -> dict[str, float]:
    """Trains as `options` say; what it cost. Memory in bytes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from training import run as train_run
    from training import stages
    from training import vae as train_vae

    train_vae.MEASURED = 8  # pictures for the latents' statistics, of 64
    train_run.LOG_EVERY = min(LAST, options["steps"])
    size = SIZES[options["size"]]
    config = ShapesConfig(
        stage=options["stage"],
        out=Path(options["out"]),
        steps=options["steps"],
        batch=BATCH,
        sizes=(PICTURE,),
        seed=SEED,
        precision=options["precision"],
        size=size,
        rate=RATES[options["stage"]],
        threads=1,
        save_every=options["steps"],
    )
    run = stages.open_run(config, lambda text: None, torch.device("cpu"))
    before, start = _peak(), time.perf_counter()
    run.all_steps()
    seconds = time.perf_counter() - start
    with config.stem.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        "parameters": sum(p.numel() for p in run.learner.parameters.values()),
        "seconds_per_step": seconds / options["steps"],
        "peak_bytes": _peak(),
        "peak_before_bytes": before,
        "first_loss": float(rows[0]["loss"]),
        "final_loss": float(rows[-1]["loss"]),
        "kept_bytes": float(sum(run.learner.kept.values()) / max(1, len(run.learner.kept))),
        "back_offs": float(rows[-1]["back_offs"]),
    }


def _peak() -> int:
    """The most that this process has ever had in memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def spawned(**options: Any) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(options)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{options}: {ran.stderr.strip()[-600:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# All runs


def measure(steps: int | None, out: Path) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            vae = Path(scratch) / size.replace(" ", "") / "first"
            count = VAE_STEPS if steps is None else steps
            for stage in ("vae", "text"):
                spawned(stage=stage, out=str(vae), steps=count, precision="fp32", size=size)
            for name, precision in PRECISIONS.items():
                folder = vae.parent / name
                folder.mkdir()
                for part in ("vae", "text_encoder", "tokenizer"):
                    (folder / part).symlink_to(vae / part)
                run = {"steps": steps or STEPS, "precision": precision, "size": size}
                rows.append({"model": size, **run, **spawned(stage="dit", out=str(folder), **run), "precision": name})
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "batch": BATCH,
        "picture": PICTURE,
        "seed": SEED,
        "date": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 1 thread",
        "versions": {"torch": version("torch"), "python": platform.python_version()},
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def tables() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    plain = {row["model"]: row for row in result["rows"] if row["precision"] == "fp32"}
    rows = [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.2f} M",
            row["precision"],
            f"{row['seconds_per_step']:.3f}",
            f"{row['seconds_per_step'] / plain[row['model']]['seconds_per_step']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
            f"{(row['peak_bytes'] - row['peak_before_bytes']) / 1e6:.0f} MB",
            f"{row['final_loss']:.3f}",
        ]
        for row in result["rows"]
    ]
    heads = [
        "model",
        "parameters",
        "precision",
        "s/step",
        "of fp32's",
        "peak memory",
        "of it in the steps",
        "final loss",
    ]
    about = (
        f"{result['rows'][0]['steps']} steps of {result['batch']} pictures of {result['picture'][0]} x "
        f"{result['picture'][1]} pixels, seed {result['seed']}; final loss: mean of the last {LAST} steps; "
        f"{result['machine']}, torch {result['versions']['torch']}, load average {result['load_average']:.1f}, "
        f"{result['date'][:10]}."
    )
    write("shapes.md", "precisions", f"{table(heads, rows)}\n\n{about}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="do not train")
    parser.add_argument("--steps", type=int, help="of every run, to try it; the page stays as it is")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(json.loads(args.child))))
        return
    if not args.tables:
        measure(args.steps, args.out)
    if args.steps is None and args.out == RESULT:
        tables()


if __name__ == "__main__":
    main()
