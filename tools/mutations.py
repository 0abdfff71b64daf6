"""Plants faults in every family on both backends and writes the table of docs/parity.md: by what each is caught.

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
from doc_tables import table, write
from lora_cases import write_lora
from mutant import Judge, Mutant
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
    for backend in BACKENDS:
        for plain in {(m.precision, m.quantize, m.picture, m.lora): m for m in mutants}.values():
            if clear := judge.caught(backend, plain, planted=False):
                missed.append(f"{name} on {backend} without a fault, {plain.precision} {plain.quantize}: {clear}")
    for mutant in mutants:
        found = [judge.caught(backend, mutant) for backend in BACKENDS]
        missed += [f"{name} {mutant.name} on {b}" for b, text in zip(BACKENDS, found, strict=True) if not text]
        kept = f" -q {mutant.quantize}" if mutant.quantize else ""
        made.append([mutant.what, mutant.precision + kept, *(clean(_short(text), SHOWN) for text in found)])
        print(name, mutant.name, *found, sep=" | ", flush=True)
    return made, missed


def _short(text: str) -> str:
    """Without what was allowed: a table has no room for it."""
    return re.sub(r", at most [^;]*", "", text)


def main() -> None:
    chosen = sys.argv[1:] or list(FAMILIES)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tables = {name: rows(name, Path(folder)) for name in chosen}
    for _, some in tables.values():
        missed += some
    if not sys.argv[1:]:
        head = ["fault", "in", *(f"on {name}" for name in ("torch", "MLX"))]
        for name, (found, _) in tables.items():
            write("parity.md", f"mutations-{name}", table(head, found))
    count = sum(len(found) for found, _ in tables.values())
    print(f"{count} faults on each of {len(BACKENDS)} backends; not caught: {', '.join(missed) or 'none'}")
    sys.exit(6 if missed else 0)


if __name__ == "__main__":
    main()
