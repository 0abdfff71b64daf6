"""Writes the table of docs/measured/performance.md that has a step and a picture of later families on machines that are
not here: a MODEL, not a measurement, as `tools/kernels_on_paper.py` counts it.

python tools/write_models_on_paper.py                # all rows: minutes
"""

from __future__ import annotations

from collections.abc import Iterator

from doc_tables import table, write
from paper import mlx_kernels, torch_kernels
from paper.on_paper import OnPaper, on_paper
from paper.published import published

from qwenimg.common.base.amounts import duration
from qwenimg.common.precision.machines import MACHINES
from qwenimg.common.precision.precision import parse

MODELS = (
    "z-image-turbo", "z-image", "flux-schnell", "flux-dev", "flux2-klein-4b", "flux2-klein-9b", "flux2-klein-9b-kv",
    "flux2-dev", "flux3-klein", "flux3-klein-base", "sd3-medium", "sd3.5-medium", "sd3.5-large", "longcat-image",
    "chroma1-hd", "auraflow", "ernie-image-turbo", "ernie-image", "krea-2-turbo", "krea-2-raw",
    "anima", "lumina-image-2", "ovis-image", "pixart-sigma", "sana-1.5", "sana-sprint", "hunyuan-dit",
)  # fmt: skip
CARDS, CHIPS = ("h100", "4090"), ("m4-max",)


def computed(name: str) -> list[OnPaper]:
    """Return what a picture of the model `name` takes on each machine, at its own size, steps and guidance."""
    subject = published(name)
    assert subject is not None, name
    usual, made = subject.defaults, []
    for machines, count in ((CARDS, torch_kernels.kernels), (CHIPS, mlx_kernels.kernels)):
        for machine in machines:
            made.append(
                on_paper(
                    count,
                    subject,
                    MACHINES[machine],
                    parse("auto", on_gpu=True, kind=subject.kind),
                    size=(usual.width, usual.height),
                    steps=usual.steps,
                    guided=usual.guidance > 1,
                )
            )
    return made


def rows() -> Iterator[tuple[str, ...]]:
    for name in MODELS:
        machines = computed(name)
        first, moved = machines[0], machines[0].step.compiled.memory_bound_bytes
        shown = (
            f"{1e3 * one.step.compiled.seconds:,.0f} ms, "
            + duration(one.picture(lambda stage: stage.compiled.seconds)).removeprefix("roughly ")
            for one in machines
        )
        yield f"`{name}`", str(first.steps), f"{moved / 1e9:.1f}", *shown
        print(name, flush=True)


def main() -> None:
    titles = (
        MACHINES[name].title.removeprefix("NVIDIA ").removeprefix("Apple ").removesuffix(" SXM")
        for name in (*CARDS, *CHIPS)
    )
    head = ("model", "steps", "GB of a step", *(f"{title}: step, picture" for title in titles))
    write("measured/performance.md", "later", table(head, list(rows())))


if __name__ == "__main__":
    main()
