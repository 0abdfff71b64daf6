"""The table of a run's losses, which all kinds of runs write."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.training.files import COLUMNS, read_table
from qwenimg.common.training.loop import Done


class LossTable:
    """The rows of the file `path`, which `write` replaces."""

    def __init__(self, path: Path, step: int):
        """Keep the rows of the steps until `step`, and drop later ones, whose steps are made again."""
        self.path = path
        self.rows = read_table(path, step) if step else []

    def add(self, done: Done, speed: float) -> None:
        """Add a row. speed: pictures per second."""
        row = (done.step, done.loss, done.rate, done.gradient, done.dtype, done.scale, done.growths, done.back_offs)
        self.rows.append(",".join(map(_text, (*row, speed))))

    def write(self) -> None:
        write_atomic(self.path, ("\n".join([",".join(COLUMNS), *self.rows]) + "\n").encode(), overwrite=True)


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
