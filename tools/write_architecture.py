"""Writes the picture and the tables of docs/architecture.md, from pyproject.toml and the source.

python tools/write_architecture.py           writes them
python tools/write_architecture.py --sizes   prints the files and lines of each room instead

The order of the rooms is that of the contract in pyproject.toml, a room's sentence the docstring of its folder, what it
uses its imports.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from doc_tables import table, write

ROOT = Path(__file__).resolve().parent.parent
PAGE = "architecture.md"
FACES = {
    "cli": "The command line: options in, lines and files out; touches no array and names no backend.",
    "cli/batch": "A file of requests drawn by several workers, local ones or on Ray: keys, journal, driver, engines.",
    "cli/ranks": "One picture on several devices: rank 0, which reads and writes, and others that compute with it.",
    "cli/serve": "The HTTP server. Its process imports no framework; a worker process for each device draws.",
    "cli/serve/apis": "The server's APIs: OpenAI's, AUTOMATIC1111's and our own, and what they share.",
    "backends/torch": "PyTorch on an NVIDIA GPU and on any CPU. The networks here are written by hand.",
    "backends/mlx": "MLX on Apple silicon and on Linux. The networks here are translated from those on torch.",
    "backends/torch/training": "The loop of a training, on torch alone; the wheel calls it nowhere yet.",
    "tools": "Commands for those who work on it: figures, tables, the translation.",
}


def contracts() -> list[dict[str, Any]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[list[str]]:
    """The rooms of `common/`, the upper ones first; those of one list do not see each other."""
    [order] = [contract for contract in contracts() if contract["type"] == "layers"]
    return [layer.split(" | ") for layer in order["layers"]]


def seen_by_backends() -> set[str]:
    """The rooms that inference on a backend may import."""
    [contract] = [c for c in contracts() if "qwenimg.common.pipeline" in c.get("forbidden_modules", ())]
    forbidden = {name.rpartition(".")[2] for name in contract["forbidden_modules"]}
    return {room for layer in layers() for room in layer} - forbidden


def picture() -> str:
    """The layers from top to bottom, a star at each room that the backends see."""
    seen = seen_by_backends()
    lines = ["cli", "qwenimg.load  (src/qwenimg/__init__.py)"]
    lines += ["   ".join(f"{room}*" if room in seen else room for room in layer) for layer in layers()]
    width = max(map(len, lines))
    return "\n".join(["```text", *(line.center(width).rstrip() for line in lines), "```"])


def sources(folder: str) -> list[Path]:
    """The Python files in `folder`, without those of a folder in it that has a row of its own."""
    inner = [ROOT / name for name in FACES if name != folder and name.startswith(f"{folder}/")]
    files = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in files if not any(path.is_relative_to(other) for other in inner)]


def uses(room: str) -> list[str]:
    """The other rooms that the files of `room` import, the upper ones first."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources(f"common/{room}"))
    imported = set(re.findall(r"^ *(?:from|import) qwenimg\.common\.(\w+)", text, re.MULTILINE))
    imported |= set(re.findall(r"^ *from qwenimg\.common import (\w+)", text, re.MULTILINE))
    return [other for layer in layers() for other in layer if other in imported and other != room]


def print_sizes() -> None:
    """Print the number of files and lines of each folder, and the sums of the product (all but tools)."""
    folders = [f"common/{room}" for layer in layers() for room in layer] + [*FACES, "backends", "src"]
    product: list[int] = []
    for folder in folders:
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in sources(folder)]
        product += [] if folder == "tools" else lines
        print(f"{folder:26}{len(lines):5}{sum(lines):8,}")
    print(f"{'product':26}{len(product):5}{sum(product):8,}")


def sentence(room: str) -> str:
    tree = ast.parse((ROOT / "common" / room / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split())


def rooms() -> str:
    rows = [(f"`{room}`", sentence(room), ", ".join(uses(room))) for layer in layers() for room in layer]
    return table(("room of `common/`", "what is in it", "uses"), rows)


def faces() -> str:
    rows = [(f"`{folder}/`", text) for folder, text in FACES.items()]
    return table(("folder", "what is in it"), rows)


def blocks() -> dict[str, str]:
    """What the page has between its markers."""
    return {"picture": picture(), "rooms": rooms(), "faces": faces()}


def main() -> None:
    if sys.argv[1:] == ["--sizes"]:
        print_sizes()
        return
    for name, text in blocks().items():
        write(PAGE, name, text)


if __name__ == "__main__":
    main()
