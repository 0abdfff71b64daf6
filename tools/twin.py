"""The networks on MLX, translated from the networks on torch: `make twins`.

A network is written once, as `backends/torch/networks/ROOM/X.py`. The rules below replace what torch and MLX call
differently, as text and for all files alike; what they do differently is in `backends/<b>/ops/`, by the same names. A
network that would need a rule of its own is written by hand on both, and named in `BY_HAND` with the reason.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH, MLX = (ROOT / "backends" / name / "networks" for name in ("torch", "mlx"))
BY_HAND: dict[str, str] = {}
NOTE = "# Translated from the file of this name in backends/torch by `make twins`: edit that one.\n"

RULES = [
    # Imports; ruff takes out what a file does not use and sorts the rest.
    (r"^import torch\n", "import mlx.core as mx\nimport mlx.nn\n"),
    (r"^from torch import Tensor\n", "from mlx.core import array as Array\n"),
    (r"\bqwenimg\.backends\.torch\b", "qwenimg.backends.mlx"),
    # Names
    (r"\bTensor\b", "Array"),
    (r"\btorch\.dtype\b", "mx.Dtype"),
    (r"\btorch\.cat\(", "mx.concatenate("),
    (r"\bdim=(-?\d)", r"axis=\1"),
    # Modules: MLX calls them, and takes a list for a list of layers.
    (r"\btorch\.nn\.ModuleList\((.*)\)$", r"\1"),
    (r"\btorch\.nn\.", "mlx.nn."),
    (r"\bdef forward\(", "def __call__("),
    # Images in documentation: [B C h w] on torch is [B h w C] on MLX.
    (r"\[(\d* ?[BN]) (\w+) (\d*h'?|h_?\d*) (\d*w'?)\]", r"[\1 \3 \4 \2]"),
    # Device: torch takes one at each call, MLX has a default.
    (r",\s+device: torch\.device\b", ""),
    (r", (self\.)?device(?=[,)])", ""),
    (r"^ *self\.device = device\n", ""),
]
RUFF = {
    "imports": ["check", "--select=F401,I", "--fix", "--quiet"],
    "layout": ["format", "--quiet"],
}


def translate(source: str) -> str:
    """The MLX file of the torch file `source`."""
    for pattern, new in RULES:
        source = re.sub(pattern, new, source, flags=re.MULTILINE)
    for command in RUFF.values():
        # The name is what ruff takes its settings by; nothing is read from it or written to it.
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={MLX / 'network.py'}", "-"]
        source = subprocess.run(
            ruff, input=source, capture_output=True, text=True, encoding="utf-8", check=True, cwd=ROOT
        ).stdout
    return NOTE + source


def names() -> list[str]:
    """The networks that are translated, with their rooms: `vaes/kl_vae`."""
    return sorted(set(modules(TORCH)) - BY_HAND.keys())


def modules(folder: Path) -> list[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*.py") if path.stem != "__init__")
    return [file.with_suffix("").as_posix() for file in files]


def drift(torch: str, mlx: str, name: str) -> list[str]:
    """Of each place where the MLX file is not the translation of the torch file: what it says, and where to edit."""
    made = translate(torch)
    left, right = made.splitlines(), mlx.splitlines()
    return [
        f"backends/mlx/networks/{name}.py:{b + 1} has {_shown(right[b:b_end])}, "
        f"its translation {_shown(left[a:a_end])}: edit "
        f"backends/torch/networks/{name}.py:{_line(torch, made, a)} and run `make twins`"
        for a, a_end, b, b_end in _differing(left, right)
    ]


def _line(torch: str, made: str, index: int) -> int:
    """The line of the torch file that line `index` of its translation came from, or the nearest before it."""
    left = torch.splitlines()
    for a, a_end, b, b_end in _runs(left, made.splitlines()):
        if b <= index < b_end:
            return min(a + index - b, max(a, a_end - 1)) + 1
    return len(left)


def _differing(left: list[str], right: list[str]) -> list[tuple[int, int, int, int]]:
    return [run for run in _runs(left, right) if left[run[0] : run[1]] != right[run[2] : run[3]]]


def _runs(left: list[str], right: list[str]) -> list[tuple[int, int, int, int]]:
    """Runs of lines of both that are equal or stand in each other's place."""
    return [run[1:] for run in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes()]


def _shown(lines: list[str]) -> str:
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"`{lines[0].strip()}`{more}" if lines else "nothing"


def main() -> None:
    for name in names():
        made = translate((TORCH / f"{name}.py").read_text(encoding="utf-8"))
        path = MLX / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            path.write_text(made, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
