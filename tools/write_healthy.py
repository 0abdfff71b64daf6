"""Holds machines with other kernels against passports and writes the table of docs/measured/parity.md: how much of the
limit each uses. Fails where a correct machine is refused.

python tools/write_healthy.py            # some minutes
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from doc_tables import table, write
from mutations import BACKENDS, TinyFolders
from support.healthy import HEALTHY
from support.mutant import PRECISIONS, Judge
from support.mutant_tables import TABLES

FAMILIES = ("qwen", "sd")


def rows(judges: dict[str, Judge]) -> list[list[str]]:
    """Of each machine, in each precision the largest share of a block and of a station."""
    made = []
    for machine in HEALTHY:
        cells = []
        for precision in PRECISIONS:
            shares = {
                (family, backend): judge.shares(backend, machine.under(precision))
                for family, judge in judges.items()
                for backend in BACKENDS
            }
            print(machine.what, precision, shares, sep=" | ", flush=True)
            cells.append(" / ".join(f"{max(share[i] for share in shares.values()):.2f}" for i in (0, 1)))
        made.append([machine.what, *cells])
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny = TinyFolders(Path(folder))
        judges = {name: TABLES[name].judge(tiny, tiny.place) for name in FAMILIES}
        write("measured/parity.md", "healthy", table(["machine", *PRECISIONS], rows(judges)))


if __name__ == "__main__":
    sys.exit(main())
