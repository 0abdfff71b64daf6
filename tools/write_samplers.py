"""Writes the table of docs/samplers.md.

python tools/write_samplers.py
"""

from __future__ import annotations

from doc_tables import table, write

from qwenimg.common.sampling.table import SAMPLERS


def main() -> None:
    rows = [(f"`{name}`", *sampler.row()[1:]) for name, sampler in SAMPLERS.items()]
    write(
        "samplers.md",
        "samplers",
        table(("name", "title", "order", "noise", "calls", "Qwen", "source"), rows),
    )


if __name__ == "__main__":
    main()
