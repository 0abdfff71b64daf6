"""Every kind of block on both backends against float64: docs/results/blocks.csv, its sum in docs/measured/parity.md.

python tools/measure_parity.py      # a minute, on the blocks of tests/support/parity_blocks.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import conftest  # noqa: F401  (the environment of the tests, before a framework is imported)
from doc_tables import read_data, table, write, write_data
from support import frameworks  # noqa: F401
from support.parity_bench import POLICIES, Bench
from support.parity_blocks import BLOCKS

from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.precision.precision import bases


def rows() -> list[list[str]]:
    """Per block and policy: each backend's error and their mutual one, in units of roundoff, and the limit."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for block in BLOCKS:
            low = POLICIES["vae"][1] if block.part == "vae" else bases(KIND)["bf16"]
            for precision in (bases(KIND)["fp32"], low):
                for verdict in bench.judge(block, precision):
                    errors = {name: figures.relative / verdict.case.unit for name, figures in verdict.figures.items()}
                    found.append(
                        [
                            f"`{block.name}`",
                            f"`{precision.name}`",
                            *(f"{errors[name]:.2f}" for name in ("torch", "MLX")),
                            f"{verdict.mutual / verdict.case.unit:.2f}",
                            f"{verdict.allowed / verdict.case.unit:.1f}",
                        ]
                    )
    return found


def summary() -> list[list[str]]:
    """Of each policy: how many inputs there are, and the block whose error is the largest share of its limit."""
    found = read_data("blocks")
    made = []
    for policy in dict.fromkeys(row["policy"] for row in found):
        some = [row for row in found if row["policy"] == policy]
        nearest = [
            max((float(row[arm]) / float(row["limit"]), row["block"]) for row in some) for arm in ("torch", "MLX")
        ]
        made.append(
            [f"`{policy}`", str(len(some)), *(f"`{block}`: {share:.2f} of its limit" for share, block in nearest)]
        )
    return made


if __name__ == "__main__":
    write_data("blocks", ["block", "policy", "torch", "MLX", "mutual", "limit"], rows())
    write("measured/parity.md", "blocks", table(["policy", "inputs", "nearest on torch", "nearest on MLX"], summary()))
