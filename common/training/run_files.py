"""The files of a run, in its folder: tables of the losses, a curve, the pictures of each prompt, and a page of all."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from qwenimg.common.base.atomic_files import make_folder, write_atomic
from qwenimg.common.base.text import clean
from qwenimg.common.pictures import html_page
from qwenimg.common.pictures.charts import Chart, Series, svg
from qwenimg.common.pictures.input import read_image
from qwenimg.common.pictures.labelled_sheet import SheetTile, sheet
from qwenimg.common.pictures.pixels import Uint8, over_white
from qwenimg.common.pictures.png import encode_png
from qwenimg.common.training.config import LoraConfig
from qwenimg.common.training.loop import Done
from qwenimg.common.training.loss_table import LossTable

POINTS = 60  # of a curve
ROWS = 24  # of the sheet: the first, the last, and others evenly between
SIDE = 192  # pixels of a picture on the sheet
_PICTURE = re.compile(r"(\d{7})-(\d{1,3})\.png")


class RunFiles:
    """The files in `folder`."""

    def __init__(self, folder: Path):
        self.folder, self.pictures = folder, folder / "samples"
        self.losses, self.judged = folder / "lora.csv", folder / "judged.jsonl"
        self._table = LossTable(self.losses, 0)
        self._judged: list[tuple[int, float, float | None]] = []

    def resume(self, step: int) -> None:
        """Keep the rows of the steps until `step`, and drop later ones, whose steps are made again."""
        make_folder(self.pictures, parents=True)
        self._table = LossTable(self.losses, step)
        if step:
            self._judged = [row for row in _read_judged(self.judged) if row[0] <= step]
        self.write_steps()
        self._write_judged()

    def add_step(self, done: Done, seconds: float, batch: int) -> None:
        """Add a row, which `write_steps` writes."""
        self._table.add(done, batch / max(seconds, 1e-9))

    def add_judged(self, step: int, learnt: float, held_out: float | None) -> None:
        self._judged = [row for row in self._judged if row[0] != step] + [(step, learnt, held_out)]
        self._write_judged()
        self.write_steps()

    def put_picture(self, step: int, number: int, pixels: Uint8) -> None:
        path = self.pictures / f"{step:07d}-{number}.png"
        write_atomic(path, encode_png(pixels, {"step": str(step)}, None), overwrite=True)

    def write_steps(self) -> None:
        """Write the table of all steps."""
        self._table.write()

    def _write_judged(self) -> None:
        lines = (json.dumps({"step": step, "learnt": a, "held_out": b}) for step, a, b in self._judged)
        write_atomic(self.judged, "".join(f"{line}\n" for line in lines).encode(), overwrite=True)

    # What is looked at

    def write_page(self, config: LoraConfig, prompts: Sequence[str]) -> None:
        """Write the curve, the sheet and the page."""
        curve = svg(self._chart())
        write_atomic(self.folder / "curve.svg", curve.encode(), overwrite=True)
        grid = self._sheet(prompts)
        if grid is not None:
            write_atomic(self.folder / "grid.png", grid, overwrite=True)
        options = ", ".join(
            f"{name} {clean(value, 60)}"
            for name, value in (
                ("steps", config.steps),
                ("rank", config.rank),
                ("rate", config.rate),
                ("batch", config.batch),
                ("precision", config.precision),
            )
        )
        rows = [[str(step), f"{a:.4f}", "" if b is None else f"{b:.4f}"] for step, a, b in self._judged]
        page = html_page.page(
            "A LoRA in training",
            html_page.paragraph(options),
            html_page.heading("Losses"),
            curve,
            html_page.table(["step", "learnt, fixed noise", "held out, fixed noise"], rows),
            *([] if grid is None else [html_page.heading("Pictures"), _image("grid.png", prompts)]),
        )
        write_atomic(self.folder / "index.html", page.encode(), overwrite=True)

    def _chart(self) -> Chart:
        losses = [row.split(",") for row in self._table.rows]
        width = max(1, -(-len(losses) // POINTS))
        groups = [losses[i : i + width] for i in range(0, len(losses), width)]
        places = [int(group[-1][0]) for group in groups]
        means = [sum(float(row[1]) for row in group) / len(group) for group in groups]
        steps = sorted({*places, *(row[0] for row in self._judged)})
        at = dict(zip(places, means, strict=True))
        learnt, held = ({row[0]: row[i] for row in self._judged} for i in (1, 2))
        series = [
            Series(name="loss of the steps", values=[at.get(step) for step in steps]),
            Series(name="learnt, fixed noise", values=[learnt.get(step) for step in steps]),
        ]
        if any(held.values()):
            series.append(Series(name="held out, fixed noise", values=[held.get(step) for step in steps]))
        return Chart(title="loss by step", places=[str(step) for step in steps], series=series)

    def _sheet(self, prompts: Sequence[str]) -> bytes | None:
        """Return the sheet: rows of steps, columns of prompts."""
        found = sorted(path for path in self.pictures.iterdir() if _PICTURE.fullmatch(path.name))
        steps = sorted({path.name[:7] for path in found})
        if not steps or not prompts:
            return None
        if len(steps) > ROWS:
            steps = [steps[round(i * (len(steps) - 1) / (ROWS - 1))] for i in range(ROWS)]
        tiles = []
        for step in steps:
            for number, prompt in enumerate(prompts):
                path = self.pictures / f"{step}-{number}.png"
                pixels = over_white(read_image(path)[0]) if path in found else np.full((8, 8, 3), 255, np.uint8)
                tiles.append(SheetTile(pixels=pixels, lines=(f"step {int(step)}", clean(prompt, 80))))
        return encode_png(sheet(tiles, len(prompts), SIDE), {}, None)


def _image(name: str, prompts: Sequence[str]) -> str:
    words = escape("; ".join(clean(prompt, 60) for prompt in prompts))
    return f'<img src="{name}" alt="pictures by step: {words}" style="max-width: 100%">'


def _read_judged(path: Path) -> list[tuple[int, float, float | None]]:
    """Return the rows of an earlier part of the run; none if the file is missing or broken."""
    rows = []
    try:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows.append(
                (int(row["step"]), float(row["learnt"]), None if row["held_out"] is None else float(row["held_out"]))
            )
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return rows
