"""The networks on MLX, translated from the networks on torch: `make twins`.

A network is written once, as `backends/torch/networks/ROOM/X.py`. The rules below replace what torch and MLX call
differently, as text and for all files alike; what they do differently is in `backends/<b>/ops/`, by the same names. A
network that would need a rule of its own is written by hand on both, and named in `BY_HAND` with the reason.
"""

from __future__ import annotations

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


def main() -> None:
    for name in names():
        made = translate((TORCH / f"{name}.py").read_text(encoding="utf-8"))
        path = MLX / f"{name}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            path.write_text(made, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
