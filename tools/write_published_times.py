"""Writes the table of docs/measured/performance.md that has the times that others published beside those that
`qwenimg plan` says for the same machine, from docs/results/published-times.json.

python tools/write_published_times.py

Nothing is measured: the plans are of published configurations, and need no files.
"""

from __future__ import annotations

import json
import subprocess
import sys

from doc_tables import DATA, table, write

TIMES = DATA / "published-times.json"
COMMAND = "import sys; from qwenimg.cli.main import run; sys.exit(run(sys.argv[1:]))"


def planned(options: str) -> float:
    """Return the seconds of a picture by `qwenimg plan`."""
    command = [sys.executable, "-c", COMMAND, "plan", *options.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds: float = json.loads(done.stdout)["picture_seconds"]
    return seconds


def main() -> None:
    rows = []
    for row in json.loads(TIMES.read_text(encoding="utf-8")):
        seconds = planned(row["plan"])
        about = ": ".join(filter(None, (row["source"], row.get("note", ""))))
        figures = f"{row['seconds']:g}", f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
        rows.append((f"`{row['plan']}`", *figures, f"{seconds / row['seconds']:.2f}", about))
    head = ("`qwenimg plan`", "published, s", "planned, s", "ratio", "source")
    write("measured/performance.md", "times", table(head, rows))


if __name__ == "__main__":
    main()
