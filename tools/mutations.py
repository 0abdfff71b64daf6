"""Plants faults in every family on both backends and writes the table of docs/parity.md: by what each is caught.

python tools/mutations.py            # some minutes; fails where one is not caught
python tools/mutations.py qwen       # one family, and no table
"""

from __future__ import annotations

import math
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
from doc_tables import table, write
from lora_cases import write_lora
from mutant import PRECISIONS, Judge, Mutant
from tiny_sd import write_tiny_sd

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


# Of each family the model, what is set in its pipeline, and the faults.
FAMILIES: Mapping[str, Model] = {
    "qwen": (built_in, mutants_qwen.prepare, mutants_qwen.MUTANTS),
    "sd": (sdxl, mutants_sd.prepare, mutants_sd.MUTANTS),
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
            texts = [judge.caught(backend, mutant.under(precision)) for backend in BACKENDS]
            missed += [
                f"{name} {mutant.name} in {precision} on {b}"
                for b, text in zip(BACKENDS, texts, strict=True)
                if not text
            ]
            cells[precision] = _cell(texts)
            print(name, mutant.name, precision, *texts, sep=" | ", flush=True)
        kept = f" (-q {mutant.quantize})" if mutant.quantize else ""
        made.append([mutant.what + kept, *(cells.get(precision, "") for precision in PRECISIONS)])
    return made, missed


def _cell(texts: list[str]) -> str:
    """What noticed a fault, and how many times what is allowed it is, on the backend where that is less."""
    texts = [text.split("; ")[0] for text in texts]
    overs = [over for over in map(_over, texts) if over is not None]
    if len(overs) < len(texts):
        return clean(min(texts, key=len), SHOWN)
    where = texts[0].removeprefix("the picture: ").partition(": ")
    about = "what enters " if where[2].startswith("what enters") else "float32 of " if "in float32" in where[2] else ""
    return clean(f"{about}{where[0]}: {min(overs):.2g} times", SHOWN)


def _over(text: str) -> float | None:
    """How many times what is allowed was found; None where that is no number."""
    if not (found := re.search(r"([-+.\de]+|nan|inf)( u)?, at most ([-+.\de]+)", text)):
        return None
    value = float(found[1])
    return math.inf if value != value else value / float(found[3])


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
            write("parity.md", f"mutations-{name}", table(head, found))
    count = sum(len(found) for found, _ in tables.values())
    print(
        f"{count} faults in each precision on each of {len(BACKENDS)} backends; not caught: {', '.join(missed) or 'none'}"
    )
    sys.exit(6 if missed else 0)


if __name__ == "__main__":
    main()
