"""Writes a trained model's card, its loss curves and SHA256SUMS from what the training and the gate left behind.

    python tools/model_card.py common/data/shapes-v1 --training OUT/training --hardware "2 cores of ..." \\
        --gate docs/results/gate-cpu-fp32.json

Figures come from tables, checkpoints and files; only the hardware is an argument. What each run was is kept in the
model's folder as `training.json`, since a run's own folder does not ship: stages that no --training has stay as they
are there, and with --append, for a model that went on from itself with --init, so do earlier runs of the same stage.
Every file in the folder is pinned, so this comes last.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from doc_tables import table
from gate import gate_rows, head
from safetensors import safe_open
from training.curve import curve
from training.data import COLOR_ONLY, DROPPED
from training.describe import dataset_hash

from qwenimg.common.families import catalog
from qwenimg.common.families.qwen_image.checkpoint import open_folder
from qwenimg.common.shapes import scenes
from qwenimg.common.training.files import FORMAT

STAGES = {"vae": "VAE", "text": "text encoder, of prompts", "dit": "transformer"}
SUMS = "SHA256SUMS"
"""The file in the folder with the hashes of the others: a line `HASH  PATH` for each, in the form of sha256sum."""
CURVE = (320, 200)  # pixels
RECORD = "training.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage of one run. `loss` is that of the first and of the last row of its table."""

    stage: str
    steps: int
    batch: int
    sizes: str
    seed: int
    dtypes: list[str]
    loss: list[float]
    hours: float
    hardware: str
    command: str


def read_runs(folder: Path, hardware: str, curves: Path) -> Iterator[Run]:
    """The stages whose tables are in `folder`, a run's folder `training`; and their curves, drawn into `curves`."""
    for stage in STAGES:
        if not (folder / f"{stage}.csv").exists():
            continue
        with (folder / f"{stage}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        with safe_open(folder / f"{stage}.safetensors", "np") as checkpoint:
            header = json.loads(checkpoint.metadata()[FORMAT])
        points = [(float(row["step"]), float(row["loss"])) for row in rows]
        (curves / f"loss-{stage}.png").write_bytes(curve(points, *CURVE))
        options = header["run"]
        sizes = ",".join(f"{w}x{h}" if w != h else f"{w}" for w, h in options["sizes"])
        yield Run(
            stage=stage,
            steps=header["step"],
            batch=options["batch"],
            sizes=sizes,
            seed=options["seed"],
            dtypes=list(dict.fromkeys(row["dtype"] for row in rows)),
            loss=[points[0][1], points[-1][1]],
            hours=round(_hours(rows, options["batch"]), 3),
            hardware=hardware,
            command=_command(stage, header["step"], options, sizes),
        )


def _hours(rows: Sequence[dict[str, str]], batch: int) -> float:
    """From the speed of each row of the table."""
    before, seconds = 0, 0.0
    for row in rows:
        seconds += (int(row["step"]) - before) * batch / max(float(row["images_per_second"]), 1e-9)
        before = int(row["step"])
    return seconds / 3600


def _command(stage: str, steps: int, options: dict[str, Any], sizes: str) -> str:
    words = ["--steps", steps, "--batch", options["batch"], "--size", sizes, "--seed", options["seed"]]
    if options.get("simple"):  # not among the options of every stage
        words += ["--simple", options["simple"]]
    return shlex.join(["python", "tools/train.py", stage, "--out", "OUT", *map(str, words)])


def kept_runs(folder: Path, new: Sequence[Run], append: bool) -> list[Run]:
    """All runs of the model: those recorded in its folder and the new ones, by stage and then in their order."""
    record = folder / RECORD
    old = [Run(**entry) for entry in json.loads(record.read_text(encoding="utf-8"))] if record.exists() else []
    renewed = set() if append else {run.stage for run in new}
    kept = [run for run in old if run.stage not in renewed]
    return sorted([*kept, *new], key=lambda run: list(STAGES).index(run.stage))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shipped(folder: Path) -> list[Path]:
    """Every file of the model but the one that pins them."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)


# The card


def card(folder: Path, runs: Sequence[Run], gates: Sequence[dict[str, Any]]) -> str:
    sections = [
        f"# {folder.name}",
        "A tiny model of Qwen-Image's architecture that draws coloured shapes, and nothing else, from English and "
        "Chinese. It comes with qwenimg so that the first command gives a picture without a download, and so that a "
        "wrong colour, side or shape is seen on any machine. It says nothing about Qwen-Image's quality or speed.",
        "Licence: Apache-2.0, as the project. No third-party data or weights: the pictures and prompts that it learned "
        "from are made by `tools/training/scenes.py` and `tools/training/describe.py`.",
        "## Parts",
        _parts(folder),
        "## Training",
        _training(runs),
        "```\n" + "\n".join(run.command for run in runs) + "\n```",
        "\n\n".join(f"![loss of {stage}](loss-{stage}.png)" for stage in dict.fromkeys(run.stage for run in runs)),
        f"Data: `training.describe.dataset_hash()` is `{dataset_hash()}`. Of the prompts, "
        f'{DROPPED:.0%} are replaced by `" "`, and {COLOR_ONLY:.0%} of those of one object by its colour alone. '
        "As in the published Qwen-Image, the text encoder is trained first and stays as it is; it learned to "
        "tell what a prompt asks for from its last token, as `tools/training/text.py` says.",
        "## Held out",
        _held_out(),
        "## The gate",
        _gate(gates),
        "## Files",
        table(
            ["file", "bytes", "SHA-256"],
            [
                [path.relative_to(folder).as_posix(), f"{path.stat().st_size:,}", f"`{digest(path)}`"]
                for path in shipped(folder)
                if path.suffix in (".safetensors", ".json", ".txt")
            ],
        ),
        f"`{SUMS}` pins every file, this one as well.",
    ]
    return "\n\n".join(sections) + "\n"


def _parts(folder: Path) -> str:
    model = open_folder(folder)
    plans = {
        "text encoder": model["text_encoder"].plan,
        "transformer": model["transformer"].plan,
        "VAE, for a still image": model["vae"].plan,
    }
    rows = [[name, f"{plan.parameters:,}", ", ".join(plan.dtypes)] for name, plan in plans.items()]
    rows.append(["all", f"{model.parameters:,}", ""])
    model.close()
    r = catalog.BUILT_IN
    default = f"Default: {r.width}x{r.height} pixels, {r.steps} steps, guidance {r.guidance:g}."
    return table(["part", "parameters", "stored as"], rows) + f"\n\n{default}"


def _training(runs: Sequence[Run]) -> str:
    rows = [
        [
            STAGES[run.stage],
            f"{run.steps:,}",
            f"{run.batch}",
            f"{run.steps * run.batch:,}",
            run.sizes,
            f"{run.seed}",
            ", ".join(run.dtypes),
            f"{run.loss[0]:.4g} to {run.loss[-1]:.4g}",
            f"{run.hours:.2f}",
            run.hardware,
        ]
        for run in runs
    ]
    heads = [
        "stage",
        "steps",
        "batch",
        "pictures seen",
        "size",
        "seed",
        "dtype",
        "loss",
        "hours",
        "hardware",
    ]
    return table(heads, rows) + f"\n\n{sum(run.hours for run in runs):.2f} hours in all."


def _held_out() -> str:
    pairs = ", ".join(f"{color} {shape}" for color, shape in scenes.HELD_OUT_PAIRS)
    relations = "; ".join(" ".join(words) for words in scenes.HELD_OUT_RELATIONS)
    return (
        f"Training never shows these pairs: {pairs}. Nor any object of the first colour so placed to one of the second,"
        f" in whatever words: {relations}. The gate's groups `held-out` and `held-out-relation` ask for them."
    )


def _gate(gates: Sequence[dict[str, Any]]) -> str:
    if not gates:
        return "Not measured."
    commands = "\n".join(one["command"] for one in gates)
    return f"{table(['prompts', 'at least', *map(head, gates)], gate_rows(gates))}\n\n```\n{commands}\n```"


def read_gate(path: Path, folder: Path) -> dict[str, Any]:
    """A result of tools/gate.py. Ends the program where it is of other weights."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, pinned in result["weights"].items():
        if not (folder / name).exists() or digest(folder / name) != pinned:
            raise SystemExit(f"{path}: is the gate of other weights than {folder / name}; run it again")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--training", type=Path, action="append", default=[], metavar="OUT/training")
    parser.add_argument("--append", action="store_true", help="the runs went on from what the folder had")
    parser.add_argument("--hardware", default="", help="what the runs of --training were on, in words")
    parser.add_argument("--gate", type=Path, action="append", default=[], metavar="RESULT.json")
    args = parser.parse_args()
    gates = [read_gate(path, args.folder) for path in args.gate]  # before anything is written
    new = [run for training in args.training for run in read_runs(training, args.hardware, args.folder)]
    if args.training and not (new and args.hardware):
        raise SystemExit("--training needs a folder with a run's table, such as dit.csv, and --hardware")
    runs = kept_runs(args.folder, new, args.append)
    if not runs:
        raise SystemExit(f"{args.folder}: no {RECORD} in it, and no --training with a table of a run, such as dit.csv")
    record = json.dumps([asdict(run) for run in runs], indent=1)
    (args.folder / RECORD).write_text(record + "\n", encoding="utf-8")
    (args.folder / "MODEL_CARD.md").write_text(card(args.folder, runs, gates), encoding="utf-8")
    lines = [f"{digest(path)}  {path.relative_to(args.folder).as_posix()}\n" for path in shipped(args.folder)]
    (args.folder / SUMS).write_text("".join(lines), encoding="ascii")
    print(f"{args.folder}: card, {len(runs)} runs, {len(lines)} files pinned", file=sys.stderr)


if __name__ == "__main__":
    main()
