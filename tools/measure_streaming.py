"""What streaming costs: one step of full-width blocks of Qwen-Image, streamed from the file and resident, in turn.

    python tools/measure_streaming.py                      # all cases
    python tools/measure_streaming.py cpu-bf16 --rounds 3  # one, shorter

The streamed transformer has 30 % of what the resident one takes, or two blocks where that is more; 1,024 tokens of a
picture and 64 of a text. CPU time is of all threads, so it is also right where other programs run; wall time is not.
The results are held against each other bit for bit. The figures go to docs/results/streaming.json, in place of those of
the same case, and from there into docs/measured/memory.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from doc_tables import DOCS, table, write
from random_model import write as write_weights

from qwenimg import backends
from qwenimg.common.families.qwen_image.family import KIND
from qwenimg.common.networks.denoisers import qwen_conditioning, qwen_dit
from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import parse
from qwenimg.common.weights import keys, streaming

SIDE, TEXT = 32, 64  # tokens
SHARE = 0.3  # of the resident transformer's bytes that the streamed one has
RESULTS = DOCS / "results" / "streaming.json"
HEAD = (
    "device",
    "weights",
    "streamed blocks",
    "weights in memory",
    "CPU, resident",
    "streamed",
    "ratio",
    "wall, resident",
    "streamed",
    "ratio",
)


@dataclass(frozen=True)
class Case:
    backend: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.precision}"


CASES = tuple(Case(backend, precision) for backend in ("cpu", "mlx") for precision in ("fp32", "bf16"))


class Arm:
    """One open transformer and its inputs."""

    def __init__(self, engine: Any, config: QwenDiTConfig, plan: Any, precision: Any):
        self.engine = engine
        self.opened = engine.open("qwen_dit", config, plan, precision)
        rng = np.random.default_rng(0)
        text = rng.standard_normal((1, TEXT, config.joint_attention_dim)).astype(np.float32)
        self.latents = engine.array(rng.standard_normal((1, SIDE * SIDE, config.in_channels)).astype(np.float32))
        self.modulation = self.opened.modulate(qwen_conditioning.time_rows(config, (500.0,), "float32"))
        self.condition = self.opened.condition([engine.array(text)], [(1, SIDE, SIDE)])
        self.cpu, self.wall = list[float](), list[float]()

    def step(self) -> bytes:
        wall, cpu = time.perf_counter(), time.process_time()
        made = self.engine.numpy(self.opened.predict(self.latents, (self.modulation, 0), self.condition))
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return bytes(made.tobytes())


def measured(path: Path, case: Case, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each step of both arms, in turn; the results are held against each other bit for bit."""
    if case.backend == "mlx":
        import fast_blas  # noqa: F401
    config = QwenDiTConfig(num_layers=layers)
    stored = qwen_dit.manifest(config)
    engine, precision = backends.load(case.backend), parse(case.precision, on_gpu=False, kind=KIND)
    plan = keys.plan(path, "transformer", stored, uses=qwen_dit.uses).stored(precision)
    moved = engine.workspace.moved
    whole = streaming.peak_weight_bytes(plan, moved)
    streamed = streaming.stream_to_fit(plan, qwen_dit.NETWORK.streamable, int(SHARE * whole), moved)
    arms = {"resident": Arm(engine, config, plan, precision), "streamed": Arm(engine, config, streamed, precision)}
    for i in range(rounds + 1):
        order = list(arms.values()) if i % 2 else list(arms.values())[::-1]
        first, second = (arm.step() for arm in order)
        assert first == second, "the bits differ"
        if i == 0:  # every block is read for the first time and checked
            for arm in arms.values():
                arm.cpu.clear()
                arm.wall.clear()
    return {
        "device": engine.device,
        "layers": layers,
        "streamed_blocks": len(streaming.streamed_blocks(streamed)),
        "resident_bytes": whole,
        "streamed_bytes": streaming.peak_weight_bytes(streamed, moved),
        **{name: {"cpu": arm.cpu, "wall": arm.wall} for name, arm in arms.items()},
    }


def row(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    """Medians of the seconds, and of the ratios of each round."""
    cells = [found["device"], case.precision, f"{found['streamed_blocks']} of {found['layers']}"]
    cells.append(f"{found['streamed_bytes'] / found['resident_bytes']:.0%}")
    for kind in ("cpu", "wall"):
        resident, streamed = (found[arm][kind] for arm in ("resident", "streamed"))
        ratio = median(b / a for a, b in zip(resident, streamed, strict=True))
        cells += [f"{median(resident):.1f} s", f"{median(streamed):.1f} s", f"{ratio:.2f}"]
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", help=", ".join(case.name for case in CASES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="writes nothing")
    asked = parser.parse_args()
    if unknown := set(asked.cases) - {case.name for case in CASES}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        manifest = qwen_dit.manifest(QwenDiTConfig(num_layers=asked.layers))
        path = write_weights(Path(folder) / "model.safetensors", manifest, "BF16")
        for case in CASES:
            if not asked.cases or case.name in asked.cases:
                results[case.name] = measured(path, case, asked.layers, asked.rounds)
                print(table(HEAD, [row(case, results[case.name])]), flush=True)
    if not asked.dry:
        known = {case.name: results[case.name] for case in CASES if case.name in results}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        rows = [row(case, known[case.name]) for case in CASES if case.name in known]
        write("measured/memory.md", "streamed", table(HEAD, rows))


if __name__ == "__main__":
    main()
