"""Writes the table of docs/performance.md of steps and pictures on paper: models without a measurement, on three
machines.

    python tools/write_on_paper_models.py

A MODEL, not a measurement: `python tools/kernels_on_paper.py h100 flux-dev` says how, for one model and machine.
"""

from __future__ import annotations

from doc_tables import table, write
from kernels_on_paper import counter
from paper import on_paper
from paper.published import published

from qwenimg.common.base.amounts import duration
from qwenimg.common.measure.machines import machine
from qwenimg.common.precision.precision import parse

MODELS = (
    "z-image-turbo", "z-image", "flux-schnell", "flux-dev", "flux2-klein-4b", "flux2-klein-9b", "sd3-medium",
    "sd3.5-medium", "sd3.5-large",
)  # fmt: skip
MACHINES = {"h100": "H100", "4090": "RTX 4090", "m4-max": "M4 Max"}
HEADS = ("model", "steps", "GB of a step", *(f"{title}: step, picture" for title in MACHINES.values()))


def row(name: str) -> tuple[str, ...]:
    subject = published(name)
    assert subject is not None
    usual, policy = subject.defaults, parse("auto", on_gpu=True, kind=subject.kind)
    cells, gigabytes = [], 0.0
    for target in map(machine, MACHINES):
        made = on_paper.on_paper(
            counter(target.title.startswith("Apple")),
            subject,
            target,
            policy,
            size=(usual.width, usual.height),
            steps=usual.steps,
            guided=usual.guidance > 1,
        )
        step, picture = made.step.compiled, made.steps * made.step.compiled.seconds + made.decoding.compiled.seconds
        cells.append(f"{1000 * step.seconds:,.0f} ms, {duration(picture).removeprefix('roughly ')}")
        gigabytes = gigabytes or step.memory_bound_bytes / 1e9
    return f"`{name}`", str(usual.steps), f"{gigabytes:.1f}", *cells


if __name__ == "__main__":
    write("performance.md", "paper-models", table(HEADS, [row(name) for name in MODELS]))
