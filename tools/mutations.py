"""Plants faults in every family on both backends and writes the table of docs/measured/parity.md: what
catches each.

python tools/mutations.py            # some minutes; fails where one is not caught
python tools/mutations.py qwen       # one family, and no table
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
import frameworks  # noqa: F401
import mutants_qwen
import mutants_sd
import mutants_sd3
import mutants_zimage
from doc_tables import table, write
from lora_cases import write_lora
from mutant import PRECISIONS, Judge, Mutant
from tiny_sd import write_tiny_sd
from tiny_sd3 import write_tiny_sd3
from tiny_zimage import write_tiny_zimage

from qwenimg.common.base.text import clean
from qwenimg.common.hub.resolve import resolve

BACKENDS = ("cpu", "mlx")
SHOWN = 90  # characters of what caught a fault
Model = tuple[Callable[[Path], str], Callable[[Any], None], tuple[Mutant, ...]]


def built_in(folder: Path) -> str:
    return "shapes"


def sdxl(folder: Path) -> str:
    write_tiny_sd(folder / "sdxl", "sdxl")
    return str(folder / "sdxl")


def z_image(folder: Path) -> str:
    write_tiny_zimage(folder / "z-image")
    return str(folder / "z-image")


def sd3(folder: Path) -> str:
    write_tiny_sd3(folder / "sd3")
    return str(folder / "sd3")


def nothing(pipe: Any) -> None:
    """Set nothing in a pipeline."""


# Of each family the model, what is set in its pipeline, and the faults.
FAMILIES: Mapping[str, Model] = {
    "qwen": (built_in, mutants_qwen.prepare, mutants_qwen.MUTANTS),
    "sd": (sdxl, mutants_sd.prepare, mutants_sd.MUTANTS),
    "z-image": (z_image, nothing, mutants_zimage.MUTANTS),
    "sd3": (sd3, nothing, mutants_sd3.MUTANTS),
}


def rows(name: str, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Of a family: the table, and what was not caught, or is seen where no fault is."""
    make, prepare, mutants = FAMILIES[name]
    place = make(folder)
    kind = "sdxl" if name == "sd" else name
    lora = write_lora(resolve(place).folder, kind, folder / f"lora-{name}.safetensors")
    judge, made, missed = Judge(place, prepare, lora), [], []
    planted = [mutant.under(precision) for mutant in mutants for precision in mutant.precisions]
    for backend in BACKENDS:
        for plain in {(m.precision, m.quantize, m.picture, m.lora): m for m in planted}.values():
            if clear := judge.caught(backend, plain, planted=False):
                missed.append(f"{name} on {backend} without a fault, {plain.precision} {plain.quantize}: {clear}")
    for mutant in mutants:
        cells = {}
        for precision in mutant.precisions:
            found = {backend: judge.caught(backend, mutant.under(precision)) for backend in BACKENDS}
            missed += [f"{name} {mutant.name} in {precision} on {b}" for b, failures in found.items() if not failures]
            cells[precision] = _cell(list(found.values()))
            print(name, mutant.name, precision, cells[precision], *found.values(), sep=" | ", flush=True)
        made.append([mutant.what, *(cells.get(precision, "") for precision in PRECISIONS)])
    return made, missed


def _cell(failures: list[list[str]]) -> str:
    """What noticed a fault the most, and how many times what is allowed it is, on the backend where that is less."""
    strongest = [max(some, key=lambda failure: _over(failure) or 0.0, default="") for some in failures]
    weakest = min(strongest, key=lambda failure: _over(failure) or 0.0)
    over = _over(weakest)
    if over is None:
        return clean(weakest, SHOWN)
    place, kind = weakest.partition(": ")[0], " in float32" if ": in float32: " in weakest else ""
    kind = ", what enters" if ": what enters it " in weakest else kind
    return clean(f"{place}{kind}: {over:.2g} times", SHOWN)


def _over(text: str) -> float | None:
    """How many times what is allowed was found; None where that is no number."""
    if not (found := re.search(r"(\d[-+.\de]*)( u)?, at most (\d[-+.\de]*)", text)):
        return None
    return float(found[1]) / float(found[3])


def main() -> None:
    chosen = sys.argv[1:] or list(FAMILIES)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tables = {name: rows(name, Path(folder)) for name in chosen}
    for _, some in tables.values():
        missed += some
    if not sys.argv[1:]:
        head = ["fault", *PRECISIONS]
        for name, (found, _) in tables.items():
            write("measured/parity.md", f"mutations-{name}", table(head, found))
    count = sum(len(found) for found, _ in tables.values())
    print(f"{count} faults on each of {len(BACKENDS)} backends; not caught: {', '.join(missed) or 'none'}")
    sys.exit(6 if missed else 0)


if __name__ == "__main__":
    main()
