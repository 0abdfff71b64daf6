"""Writes the table of docs/fleet.md: pictures a day of one, 8 and 1,000 GPUs, on paper.

python tools/write_fleet.py

A GPU draws 86,400 s / t pictures a day, where t is what `qwenimg plan MODEL --on MACHINE` says of a picture.
"""

from __future__ import annotations

import os
import tempfile

from doc_tables import table, write

from qwenimg.backends.paper import on_paper
from qwenimg.common.base.amounts import parse_bytes
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.hub.outlook import of_model
from qwenimg.common.measure.machines import machine

PAGE, BLOCK = "fleet.md", "fleet"
HEADS = ("GPU", "model", "a picture", "a day on 1", "on 8", "on 1,000", "of these a second")
DAY = 86_400  # seconds
MACHINES = (("h100", 80), ("a100", 80), ("4090", 24))
MODELS = (("qwen-image", False), ("qwen-image", True), ("z-image-turbo", False), ("sdxl", False))


def rows() -> list[tuple[str, ...]]:
    """Return the lines of the table."""
    lines: list[tuple[str, ...]] = []
    for name, gigabytes in MACHINES:
        there = machine(name)
        engine = on_paper("auto", parse_bytes(f"{gigabytes}GB", name), there)
        for number, (model, few) in enumerate(MODELS):
            one = of_model(KNOWN[model], engine)[few]
            seconds = one.times.picture
            assert seconds is not None and one.fits, (name, model)
            title = f"`{model}{' ' + one.options if one.options else ''}`, {one.steps} steps"
            counts = [_digits(count * DAY / seconds) for count in (1, 8, 1000)]
            short = there.title.removeprefix("NVIDIA ") if number == 0 else ""
            lines.append((short, title, f"{_digits(seconds)} s", *counts, _digits(1000 / seconds)))
    return lines


def _digits(count: float) -> str:
    """Return `count` in two digits: plans are no more exact than that."""
    return f"{float(f'{count:.2g}'):,.{0 if count >= 10 else 1}f}"


def text() -> str:
    return table(HEADS, rows())


def main() -> None:
    with tempfile.TemporaryDirectory() as empty:
        os.environ["HF_HUB_CACHE"] = empty  # as for who has pulled nothing: all is planned as it is published
        write(PAGE, BLOCK, text())


if __name__ == "__main__":
    main()
