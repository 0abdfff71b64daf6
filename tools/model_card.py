"""Writes a trained model's card, its loss curves and SHA256SUMS from what the training and the gate left behind.

    python tools/model_card.py common/data/shapes-v1 --training OUT/training --hardware "2 cores of ..." \\
        --gate docs/results/gate-cpu-fp32.json

Figures come from tables, logs, checkpoints and files; only the hardware is told. A model that was trained in several
runs (--init) has several --training, in their order. Every file in the folder is pinned, so this comes last.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doc_tables import table
from gate import gate_rows
from safetensors import safe_open

from qwenimg.backends.torch.train_state import FORMAT, curve
from qwenimg.common import builtin, recipes, shapes, shapes_gate
from qwenimg.common.model import open_model

STAGES = {"vae": "VAE", "text": "text encoder", "dit": "transformer"}
CURVE = (320, 200)  # pixels


@dataclass(frozen=True, kw_only=True)
class Run:
    """One stage of one run, from its table and its checkpoint. `options` are those of its command."""

    stage: str
    rows: list[dict[str, str]]
    steps: int
    options: dict[str, Any]

    @property
    def hours(self) -> float:
        """From the speed of each row of the table."""
        before, seconds = 0, 0.0
        for row in self.rows:
            images = (int(row["step"]) - before) * self.options["batch"]
            seconds += images / max(float(row["images_per_second"]), 1e-9)
            before = int(row["step"])
        return seconds / 3600

    @property
    def command(self) -> str:
        sizes = ",".join(f"{w}x{h}" if w != h else f"{w}" for w, h in self.options["sizes"])
        told = [
            "--steps",
            self.steps,
            "--batch",
            self.options["batch"],
            "--size",
            sizes,
            "--seed",
            self.options["seed"],
        ]
        if self.options.get("simple"):  # the tables of older runs do not have it
            told += ["--simple", self.options["simple"]]
        return shlex.join(["qwenimg", "train", self.stage, "--out", "OUT", *map(str, told)])


def read_runs(folder: Path) -> Iterator[Run]:
    """The stages whose tables are in `folder`, a run's folder `training`."""
    for stage in STAGES:
        if not (folder / f"{stage}.csv").exists():
            continue
        with (folder / f"{stage}.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        with safe_open(folder / f"{stage}.safetensors", "np") as checkpoint:
            header = json.loads(checkpoint.metadata()[FORMAT])
        yield Run(stage=stage, rows=rows, steps=header["step"], options=header["run"])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shipped(folder: Path) -> list[Path]:
    """Every file of the model but the one that pins them."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != builtin.SUMS)


# The card


def card(folder: Path, runs: Sequence[Run], gates: Sequence[dict[str, Any]], hardware: str, commands: list[str]) -> str:
    told = commands or [run.command for run in runs]
    sections = [
        f"# {folder.name}",
        "A tiny model of Qwen-Image's architecture that draws coloured shapes, and nothing else, from English and "
        "Chinese. It comes with qwenimg so that the first command gives a picture without a download, and so that a "
        "wrong colour, side or shape is seen on any machine. It says nothing about Qwen-Image's quality or speed.",
        "Licence: Apache-2.0, as the project. No third-party data or weights: the pictures and prompts that it learned "
        "from are made by `common/shapes.py` and `common/shapes_words.py`.",
        "## Parts",
        _parts(folder),
        "## Training",
        _training(runs, hardware),
        "```\n" + "\n".join(told) + "\n```",
        "\n\n".join(f"![loss of {stage}](loss-{stage}.png)" for stage in dict.fromkeys(run.stage for run in runs)),
        f"Data: `shapes_gate.dataset_hash()` is `{shapes_gate.dataset_hash()}`. A tenth of the prompts is replaced by "
        '`" "`. As in the published Qwen-Image, the text encoder is trained first and stays as it is; it learned to '
        "tell what a prompt asks for from its last token, as `backends/torch/train_text.py` says.",
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
        f"`{builtin.SUMS}` pins every file, this one as well.",
    ]
    return "\n\n".join(sections) + "\n"


def _parts(folder: Path) -> str:
    model = open_model(folder)
    plans = {"text encoder": model.text, "transformer": model.transformer, "VAE, for a still image": model.vae}
    rows = [[name, f"{plan.parameters:,}", ", ".join(plan.dtypes)] for name, plan in plans.items()]
    rows.append(["all", f"{model.parameters:,}", ""])
    model.close()
    r = recipes.BUILT_IN
    default = f"Default: {r.width}x{r.height} pixels, {r.steps} steps, guidance {r.guidance:g}."
    return table(["part", "parameters", "stored as"], rows) + f"\n\n{default}"


def _training(runs: Sequence[Run], hardware: str) -> str:
    rows = []
    for run in runs:
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in run.rows))
        sizes = ", ".join(f"{width}x{height}" for width, height in run.options["sizes"])
        batch, seed = run.options["batch"], run.options["seed"]
        images = f"{run.steps * batch:,}"
        loss = f"{float(run.rows[0]['loss']):.4g} to {float(run.rows[-1]['loss']):.4g}"
        rows.append(
            [
                STAGES[run.stage],
                f"{run.steps:,}",
                f"{batch}",
                images,
                sizes,
                f"{seed}",
                dtypes,
                loss,
                f"{run.hours:.2f}",
            ]
        )
    heads = ["stage", "steps", "batch", "pictures seen", "size", "seed", "dtype", "loss", "hours"]
    return table(heads, rows) + f"\n\nHardware: {hardware}. {sum(run.hours for run in runs):.2f} hours in all."


def _held_out() -> str:
    pairs = ", ".join(f"{color} {shape}" for color, shape in shapes.HELD_OUT_PAIRS)
    relations = "; ".join(" ".join(words) for words in shapes.HELD_OUT_RELATIONS)
    return (
        f"Training never shows these pairs: {pairs}. Nor any object of the first colour so placed to one of the second,"
        f" in whatever words: {relations}. The gate's groups `held-out` and `held-out-relation` ask for them."
    )


def _gate(gates: Sequence[dict[str, Any]]) -> str:
    if not gates:
        return "Not measured."
    heads = ["prompts", "at least", *(f"{one['backend']} {one['precision']}" for one in gates)]
    commands = "\n".join(one["command"] for one in gates)
    return f"{table(heads, gate_rows(gates))}\n\n```\n{commands}\n```"


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
    parser.add_argument("--training", type=Path, action="append", required=True, metavar="OUT/training")
    parser.add_argument("--hardware", required=True, help="what it was trained on, in words")
    parser.add_argument("--gate", type=Path, action="append", default=[], metavar="RESULT.json")
    parser.add_argument(
        "--command", action="append", default=[], help="each as it was; made from the runs unless given"
    )
    args = parser.parse_args()
    runs = [run for folder in args.training for run in read_runs(folder)]
    if not runs:
        raise SystemExit(f"{args.training[0]}: no table of a run; expected vae.csv or dit.csv")
    gates = [read_gate(path, args.folder) for path in args.gate]
    for run in runs:
        points = [(float(row["step"]), float(row["loss"])) for row in run.rows]
        (args.folder / f"loss-{run.stage}.png").write_bytes(curve(points, *CURVE))
    text = card(args.folder, runs, gates, args.hardware, args.command)
    (args.folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    lines = [f"{digest(path)}  {path.relative_to(args.folder).as_posix()}\n" for path in shipped(args.folder)]
    (args.folder / builtin.SUMS).write_text("".join(lines), encoding="ascii")
    print(f"{args.folder}: card, {len(runs)} curves, {len(lines)} files pinned", file=sys.stderr)


if __name__ == "__main__":
    main()
