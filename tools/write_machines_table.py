"""Writes the table of docs/memory.md: on which machine which command draws, in how much memory and how long; and the
first row of some of these machines for the README.

python tools/write_machines_table.py

Computed from published configurations and rates; nothing in it depends on the machine that writes it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from doc_tables import table, write

from qwenimg.backends.paper import on_paper
from qwenimg.backends.workspaces import TORCH_CPU
from qwenimg.common.base.amounts import parse_bytes, size_text
from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.hub.forecast import FitForecast, first, of_model
from qwenimg.common.precision import devices
from qwenimg.common.precision.machines import machine
from qwenimg.common.runtime.paper import OnPaper

PAGE, BLOCK = "memory.md", "machines"
README, FEW = "../README.md", "best"  # one row for each machine of README_MACHINES: the first of its forecast
HEADS = ("you have", "model", "command", "peak memory", "a picture takes about")
# GB on the box, and one common machine with as much. Cards that stream have all 16 lanes of PCI Express 4.0.
CARDS = ((8, "3070"), (12, "3060"), (16, "4060-ti"), (24, "4090"))
MACS = ((16, "m1"), (24, "m4"), (32, "m1-max"), (48, "m4-pro"), (64, "m4-max"))
# Of a CPU that is nobody's: float32 products on 8 cores, at half of what AVX2 does at 3 GHz; 8 of its 16 GB free.
CORES, CORE_RATE, CPU_FREE = 8, 48e9, 8 * 10**9
SMALL = 17 * 10**9  # bytes that are free
README_MACHINES = (("NVIDIA, 8 GB", "3070", 8), ("NVIDIA, 12 GB", "3060", 12), ("NVIDIA, 24 GB", "4090", 24),
                   ("Mac, 32 GB", "m1-max", 32))  # fmt: skip
CPU_MODELS = ("sd15", "sdxl-turbo")
TITLES = {
    "z-image-turbo": "Z-Image-Turbo",
    "qwen-image": "Qwen-Image",
    "sdxl": "SDXL",
    "sdxl-turbo": "SDXL-Turbo",
    "sd15": "SD 1.5",
}


def rows() -> list[tuple[str, ...]]:
    """Return the lines of the table."""
    lines: list[tuple[str, ...]] = []
    for title, engine, outlooks in _machines():
        found = [_row(one) for one in outlooks]
        assert found, f"{title}: nothing fits on {engine.device}"
        lines += [(title if number == 0 else "", *row) for number, row in enumerate(found)]
    return lines


def _machines() -> Iterator[tuple[str, OnPaper, list[FitForecast]]]:
    for kind, several in (("NVIDIA, {} GB: {}", CARDS), ("Mac, {} GB: {}", MACS)):
        for gigabytes, name in several:
            found = machine(name)
            engine = on_paper("auto", parse_bytes(f"{gigabytes}GB", name), found)
            short = found.title.removeprefix("NVIDIA ").removeprefix("Apple ")
            yield kind.format(gigabytes, short), engine, on_gpu(engine)
    yield f"CPU, {CORES} cores", a_cpu(), [of_model(KNOWN[name], a_cpu())[0] for name in CPU_MODELS]


def a_cpu() -> OnPaper:
    facts = devices.cpu("CPU (torch)", bf16=False)
    rate = CORES * CORE_RATE
    return OnPaper(name="cpu", facts=facts, workspace=TORCH_CPU, free=CPU_FREE, rate=lambda layer, dtype, small: rate)


def on_gpu(engine: OnPaper) -> list[FitForecast]:
    """Return Z-Image-Turbo, Qwen-Image in few steps, and on a smaller machine SDXL: those that fit."""
    large = of_model(KNOWN["z-image-turbo"], engine)[0], of_model(KNOWN["qwen-image"], engine)[1]
    small = [] if engine.free_memory() > SMALL else of_model(KNOWN["sdxl"], engine)
    return [one for one in (*large, *small) if one.fits]


def few() -> str:
    """Return the README's table."""
    lines = []
    for title, name, gigabytes in README_MACHINES:
        found = machine(name)
        short = found.title.removeprefix("NVIDIA ").removeprefix("Apple ")
        lines.append((f"{title}: {short}", *_row(first(on_paper("auto", parse_bytes(f"{gigabytes}GB", name), found)))))
    lines.append((f"only a CPU, {CORES} cores", *_row(first(a_cpu()))))
    return table(HEADS, lines)


def _row(one: FitForecast) -> tuple[str, ...]:
    step = "step" if one.steps == 1 else "steps"
    _, time = one.times.texts()
    title = f"{TITLES[one.model.name]}, {one.steps} {step}"
    return title, f"`{one.command}`", size_text(one.peak), time.removeprefix("roughly ")


def text() -> str:
    return table(HEADS, rows())


def main() -> None:
    with tempfile.TemporaryDirectory() as empty:
        os.environ["HF_HUB_CACHE"] = empty  # as for who has pulled nothing: all is planned as it is published
        write(PAGE, BLOCK, text())
        write(README, FEW, few())


if __name__ == "__main__":
    main()
