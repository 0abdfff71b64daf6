"""Plants faults in every family on both backends and writes what catches each into docs/results, and the summary
into docs/measured/parity.md.

python tools/mutations.py            # many minutes; fails where one is not caught
python tools/mutations.py qwen       # one family
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
from doc_tables import read_data, table, write, write_data
from support import frameworks  # noqa: F401
from support.mutant import PRECISIONS, Judged, Mutant
from support.mutant_tables import TABLES
from support.tiny_anima import write_tiny_anima
from support.tiny_auraflow import write_tiny_auraflow
from support.tiny_cascade import write_tiny_cascade
from support.tiny_chroma import write_tiny_chroma
from support.tiny_edit import write_tiny_edit
from support.tiny_ernie import write_tiny_ernie
from support.tiny_flux import write_tiny_flux
from support.tiny_flux2 import write_tiny_flux2
from support.tiny_flux2_dev import write_tiny_flux2_dev
from support.tiny_flux3 import write_tiny_flux3
from support.tiny_hunyuan import write_tiny_hunyuan
from support.tiny_krea2 import write_tiny_krea2
from support.tiny_layered import write_tiny_layered
from support.tiny_longcat import write_tiny_longcat
from support.tiny_lumina import write_tiny_lumina
from support.tiny_model import write_tiny_model
from support.tiny_ovis import write_tiny_ovis
from support.tiny_pixart import write_tiny_pixart
from support.tiny_qwen21 import write_tiny_qwen21
from support.tiny_sana import write_tiny_sana
from support.tiny_sd import write_tiny_sd
from support.tiny_sd3 import write_tiny_sd3
from support.tiny_zimage import write_tiny_zimage

from qwenimg.common.base.text import clean

BACKENDS = ("cpu", "mlx")
CRASHED = "breaks off:"
SHOWN = 90  # characters of what caught a fault
TITLES = {
    "qwen": "Qwen-Image", "sd": "SDXL", "z-image": "Z-Image", "sd3": "Stable Diffusion 3", "flux": "FLUX.1",
    "flux2": "FLUX.2 klein", "flux2-dev": "FLUX.2 dev", "flux2-kv": "FLUX.2 klein KV", "flux3": "FLUX.3 Image Klein",
    "qwen-edit": "Qwen-Image-Edit",
    "qwen-layered": "Qwen-Image-Layered", "longcat": "LongCat-Image", "chroma": "Chroma", "ernie": "ERNIE-Image",
    "krea2": "Krea 2", "anima": "Anima", "ovis": "Ovis-Image", "lumina": "Lumina-Image 2.0",
    "pixart": "PixArt", "cascade": "Stable Cascade", "auraflow": "AuraFlow",
    "sana": "SANA", "sana-sprint": "SANA-Sprint",
    "hunyuan": "Hunyuan-DiT",
    "qwen21": "Qwen-Image-2.1",
    "qwen-control": "ControlNets of Qwen-Image",
}  # fmt: skip
WRITERS: Mapping[str, Callable[[Path], None]] = {
    "sdxl": lambda folder: write_tiny_sd(folder, "sdxl"),
    "z-image": write_tiny_zimage,
    "sd3": write_tiny_sd3,
    "flux-dev": lambda folder: write_tiny_flux(folder, "dev"),
    "flux-kontext": lambda folder: write_tiny_flux(folder, "kontext"),
    "flux-fill": lambda folder: write_tiny_flux(folder, "fill"),
    "flux2-base": lambda folder: write_tiny_flux2(folder, distilled=False),
    "flux2-kv": lambda folder: write_tiny_flux2(folder, distilled=True, kv=True),
    "flux2-dev": write_tiny_flux2_dev,
    "flux3-base": lambda folder: write_tiny_flux3(folder, distilled=False),
    "flux3-klein": lambda folder: write_tiny_flux3(folder, distilled=True),
    "chroma": write_tiny_chroma,
    "ernie": write_tiny_ernie,
    "krea2": write_tiny_krea2,
    "anima": write_tiny_anima,
    "auraflow": write_tiny_auraflow,
    "cascade": write_tiny_cascade,
    "lumina": write_tiny_lumina,
    "sana": write_tiny_sana,
    "sana-sprint": lambda folder: write_tiny_sana(folder, "sana-sprint"),
    "ovis": write_tiny_ovis,
    "pixart-alpha": lambda folder: write_tiny_pixart(folder, "pixart-alpha"),
    "hunyuan-1.1": lambda folder: write_tiny_hunyuan(folder, "hunyuan-1.1"),
    "longcat": lambda folder: write_tiny_longcat(folder, "text"),
    "longcat-edit": lambda folder: write_tiny_longcat(folder, "edit"),
    "qwen": write_tiny_model,
    "qwen-2511": lambda folder: write_tiny_edit(folder, "2511"),
    "qwen-layered": write_tiny_layered,
    "qwen21": write_tiny_qwen21,
}


class TinyFolders(dict[str, Path]):
    """The folders of tiny models by kind, each written when it is asked for."""

    def __init__(self, place: Path):
        super().__init__()
        self.place = place

    def __missing__(self, kind: str) -> Path:
        self[kind] = self.place / kind
        WRITERS[kind](self[kind])
        return self[kind]


def rows(name: str, tiny: TinyFolders) -> tuple[list[list[str]], list[str]]:
    """Of a family: the table, and what was not caught, or is seen where no fault is."""
    begin, mutants = time.monotonic(), TABLES[name].mutants
    scratch = tiny.place / f"{name}-files"
    scratch.mkdir()
    judge, made, missed = TABLES[name].judge(tiny, scratch), [], []
    planted = [mutant.under(precision) for mutant in mutants for precision in mutant.precisions]
    for backend in BACKENDS:
        for plain in {(m.precision, m.quantize, m.picture, m.lora, m.scene): m for m in planted}.values():
            if clear := _caught(judge, backend, plain, planted=False):
                where = f"{plain.precision} {plain.quantize} {plain.scene}"
                missed.append(f"{name} on {backend} without a fault, {where}: {clear}")
    for mutant in mutants:
        cells = {}
        for precision in mutant.precisions:
            found = {backend: _caught(judge, backend, mutant.under(precision)) for backend in BACKENDS}
            missed += [
                f"{name} {mutant.name} in {precision} on {backend} {' '.join(failures)}".rstrip()
                for backend, failures in found.items()
                if not failures or failures[0].startswith(CRASHED)
            ]
            cells[precision] = _cell(list(found.values()))
            print(name, mutant.name, precision, cells[precision], *found.values(), sep=" | ", flush=True)
        made.append([mutant.what, *(cells.get(precision, "") for precision in PRECISIONS)])
    print(f"{name}: {len(mutants)} faults, {time.monotonic() - begin:.0f} s", flush=True)
    return made, missed


def _caught(judge: Judged, backend: str, mutant: Mutant, *, planted: bool = True) -> list[str]:
    """By what; a fault that is not judged, since the program breaks off, is caught by nothing."""
    try:
        return judge.caught(backend, mutant, planted=planted)
    except Exception as error:
        return [f"{CRASHED} {type(error).__name__}: {clean(error, 200)}"]


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


def summary() -> list[list[str]]:
    """Of each family: its faults, how many are planted in each precision, and the one that exceeds its limit least."""
    made = []
    for name, title in TITLES.items():
        found = read_data(f"mutations-{name}")
        counts = [str(sum(bool(row[precision]) for row in found)) for precision in PRECISIONS]
        caught = [(times, row["fault"]) for row in found for cell in row.values() if (times := _times(cell))]
        least, fault = min(caught)
        made.append([title, str(len(found)), *counts, f"{fault}: {least:.2g} times"])
    return made


def _times(cell: str) -> float:
    """Return how many times what is allowed a cell has; 0 where it has no number."""
    return float(found[1]) if (found := re.search(r"(\d[-+.\de]*) times$", cell)) else 0.0


def main() -> None:
    missed, count = list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyFolders(Path(folder))
        for name in sys.argv[1:] or TABLES:
            found, some = rows(name, tiny)
            missed, count = missed + some, count + len(found)
            write_data(f"mutations-{name}", ["fault", *PRECISIONS], found)
    write("measured/parity.md", "mutations", table(["model", "faults", *PRECISIONS, "the least"], summary()))
    print(f"{count} faults on each of {len(BACKENDS)} backends; not caught: {', '.join(missed) or 'none'}")
    sys.exit(6 if missed else 0)


if __name__ == "__main__":
    main()
