"""Writes the table of docs/performance.md from docs/results/step-cpu.json, which tools/bench_step.py wrote.

python tools/write_performance.py
"""

from __future__ import annotations

import json

from doc_tables import DOCS, table, write


def main() -> None:
    result = json.loads((DOCS / "results" / "step-cpu.json").read_text())
    rows = [
        [
            part["dtype"],
            f"{part['image_tokens']} + {part['text_tokens']}",
            row["arm"],
            f"{row['median_of_ratios']:.2f}",
            f"{row['relative_l2']:.1e}",
            f"{row['weight_bytes'] / 1e9:.2f} GB",
        ]
        for part in result["tables"]
        for row in part["rows"]
    ]
    heads = ["dtype", "image + text tokens", "arm", "time against diffusers", "error against float64", "weights"]
    write("performance.md", "steps", table(heads, rows))
    place = f"{result['device']}, {result['cpu_capability']}, {result['threads']} of {result['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    load = f"load average {result['load_average']:.1f} before and {result['load_average_after']:.1f} after"
    write("performance.md", "machine", f"{place}; {versions}; {result['runs']} runs of each arm in turn; {load}.")


if __name__ == "__main__":
    main()
