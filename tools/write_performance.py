"""Writes the table of docs/performance.md from what tools/bench_step.py wrote: float32 from a run of its own, made on a
quiet machine, since its ratio is near 1; bfloat16 from the whole run.

python tools/write_performance.py
"""

from __future__ import annotations

import json
from typing import Any

from doc_tables import DOCS, table, write

RUNS = {"fp32": "step-cpu-fp32.json", "bf16": "step-cpu.json"}


def main() -> None:
    rows, machines = [], []
    for dtype, name in RUNS.items():
        result = json.loads((DOCS / "results" / name).read_text())
        rows += [
            [
                dtype,
                f"{part['image_tokens']} + {part['text_tokens']}",
                row["arm"],
                f"{row['ratio_of_medians']:.2f}",
                f"{row['relative_l2']:.1e}",
                f"{row['weight_bytes'] / 1e9:.2f} GB",
            ]
            for part in result["tables"]
            if part["dtype"] == dtype
            for row in part["rows"]
        ]
        machines.append(f"- {dtype}, `docs/results/{name}`: {_machine(result)}")
    heads = ["dtype", "image + text tokens", "arm", "time against diffusers", "error against float64", "weights"]
    write("performance.md", "steps", table(heads, rows))
    write("performance.md", "machine", "\n".join(machines))


def _machine(result: dict[str, Any]) -> str:
    place = f"{result['device']}, {result['cpu_capability']}, {result['threads']} of {result['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    load = f"load average {result['load_average']:.1f} before and {result['load_average_after']:.1f} after"
    return f"{place}; {versions}; {result['runs']} runs of each arm in turn; {load}"


if __name__ == "__main__":
    main()
