"""Writes the tables of docs/measured/performance.md from what tools/bench_step.py, bench_coders.py, bench_around.py,
bench_load.py and `tools/bench_against.py mflux` wrote.

Of the transformer each dtype comes from a run of its own, bfloat16 from two: on a processor with instructions for it
and on one without.

python tools/write_performance.py
"""

from __future__ import annotations

import json
from typing import Any

from doc_tables import DOCS, table, write

RATIOS = ("processor_ratio", "ratio")
INSIDE = "all inside"  # what an arm also makes in every step, as diffusers does; only in the JSON
RUNS = {
    "step-cpu-fp32.json": ("fp32", "fp32"),
    "step-cpu-bf16.json": ("bf16", "bf16"),
    "step-cpu-bf16-avx2.json": ("bf16", "bf16, no instructions"),
}


def main() -> None:
    rows, machines = [], []
    for name, (dtype, title) in RUNS.items():
        result = json.loads((DOCS / "results" / name).read_text())
        rows += [
            [
                title,
                f"{part['image_tokens']} + {part['text_tokens']}",
                row["arm"],
                f"{row['ratio_of_processor_medians']:.2f}",
                f"{row['relative_l2']:.1e}",
                f"{part['rows'][0]['relative_l2']:.1e}",
                f"{row['weight_bytes'] / 1e9:.2f} GB of {part['rows'][0]['weight_bytes'] / 1e9:.2f}",
            ]
            for part in result["tables"]
            if part["dtype"] == dtype
            for row in part["rows"][1:]
            if not row["arm"].endswith(INSIDE)
        ]
        machines.append(f"- {title}, `docs/results/{name}`: {_machine(result)}")
    heads = [
        "dtype",
        "image + text tokens",
        "arm",
        "processor time against diffusers",
        "error against float64",
        "of diffusers",
        "weights",
    ]
    write("measured/performance.md", "steps", table(heads, rows))
    write("measured/performance.md", "machine", "\n".join(machines))
    _unets()
    _coders()
    _mflux()
    _around()
    _loading()


def _loading() -> None:
    """How fast weights are loaded, against reading the file and against a copy in memory."""
    result = json.loads((DOCS / "results" / "load-cpu.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    load = f"load average {result['load_average']:.1f} before and {result['load_average_after']:.1f} after"
    machine = f"{result['cores']} cores; {versions}; medians of {result['runs']} runs of each in turn; {load}"
    rows = []
    for row in result["rows"]:
        rates = [f"{row['bytes'] / 1e9 / row['processor'][arm]:.2f}" for arm in ("load", "file", "memcpy")]
        size, wall = f"{row['bytes'] / 1e9:.2f} GB {row['dtype']}", row["wall"]["load"] / row["wall"]["file"]
        rows.append([row["backend"], size, *rates, f"{wall:.2f}"])
    heads = ["backend", "weights", "loaded, GB per processor second", "file alone", "memcpy", "time against file alone"]
    write("measured/performance.md", "load", f"- `docs/results/load-cpu.json`: {machine}\n\n{table(heads, rows)}")


def _mflux() -> None:
    """The transformer's steps on MLX against mflux's: lines of `tools/bench_against.py mflux --json`."""
    name, rows, machines = "mflux-cpu.jsonl", [], {}
    for line in (DOCS / "results" / name).read_text().splitlines():
        made = json.loads(line)
        ours, peer = made["arms"]
        versions = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
        steps = f"slopes of {made['few']} to {made['many']} steps, medians of {made['rounds']} rounds"
        load = f"load average {ours['load_average']:.1f} after ours and {peer['load_average']:.1f} after mflux's"
        machines[f"- `docs/results/{name}`: {ours['device']}; {versions}; {steps}; {load}"] = None
        ratios = [made[key] if isinstance(made[key], str) else f"{made[key]:.2f}" for key in RATIOS]
        size = f"{made['width']}x{made['height']}"
        rows.append([size, peer["precision"], f"{made['guidance']:g}", *ratios, f"{made['difference']:.1e}"])
    heads = ["picture", "dtype", "guidance", "processor time against mflux", "time", "difference of the latents"]
    write("measured/performance.md", "mflux", "\n".join(machines) + "\n\n" + table(heads, rows))


def _around() -> None:
    """What is around the steps, as processor time against what it is compared with."""
    result = json.loads((DOCS / "results" / "around-cpu.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = f"{result['cores']} cores; {versions}; medians of {result['runs']} runs of each in turn"
    rows = [[row["what"], row["against"], f"{row['ratio']:.2f}"] for row in result["rows"]]
    text = table(["what", "against", "processor time"], rows)
    write("measured/performance.md", "around", f"- `docs/results/around-cpu.json`: {machine}\n\n{text}")


def _unets() -> None:
    """Stable Diffusion's UNet, from every run that is there."""
    rows, machines = [], []
    for path in sorted((DOCS / "results").glob("unet-*.json")):
        result = json.loads(path.read_text())
        machines.append(f"- `docs/results/{path.name}`: {_machine(result)}")
        for part in result["tables"]:
            side = round(part["image_tokens"] ** 0.5)
            for row in part["rows"][1:]:
                times = [f"{row[key]:.2f}" for key in ("ratio_of_medians", "ratio_of_processor_medians")]
                size = f"{side}x{side} x {part['branches']}"
                rows.append([result["layers"], part["dtype"], size, row["arm"], *times, f"{row['relative_l2']:.1e}"])
    heads = ["model", "dtype", "latents", "arm", "time", "processor time", "difference from diffusers' float32"]
    write("measured/performance.md", "unets", "\n".join(machines) + "\n\n" + table(heads, rows))


def _coders() -> None:
    """VAEs and text encoders, as processor time of one thread."""
    result = json.loads((DOCS / "results" / "coders-cpu.json").read_text())
    rows = []
    for part in result["tables"]:
        for row in part["rows"][1:]:
            ratio = row["ratio_of_processor_medians"]
            shown = ratio if isinstance(ratio, str) else f"{ratio:.2f}"
            runs, difference = str(part["runs"]), f"{row['relative_l2']:.1e}"
            rows.append([part["what"], part["size"], part["dtype"], row["arm"], runs, shown, difference])
    heads = ["what", "size", "dtype", "arm", "runs", "processor time", "difference from the peer's float32"]
    machine = f"- `docs/results/coders-cpu.json`: {_place(result)}"
    write("measured/performance.md", "coders", f"{machine}\n\n{table(heads, rows)}")


def _machine(result: dict[str, Any]) -> str:
    load = f"load average {result['load_average']:.1f} before and {result['load_average_after']:.1f} after"
    return f"{_place(result)}; {result['runs']} runs of each arm in turn; {load}"


def _place(result: dict[str, Any]) -> str:
    place = f"{result['device']}, {result['cpu_capability']}, {result['threads']} of {result['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{place}; {versions}"


if __name__ == "__main__":
    main()
