"""What streaming costs: one step of full-width blocks of Qwen-Image, streamed from the file and resident, in turn.

    python tools/measure_streaming.py [--backend cpu] [--layers 4] [--rounds 5] [--precision bf16]

Every block is streamed, through two; 1,024 tokens of a picture and 64 of a text. CPU time is of all threads, so it is
also right where other programs run; wall time is not. The results are held against each other bit for bit. Writes the
figures of docs/memory.md again, unless --dry is given.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from doc_tables import table, write
from wide_checkpoint import write as write_weights

from qwenimg import backends
from qwenimg.common.networks import qwen_conditioning, qwen_dit
from qwenimg.common.networks.qwen_dit import QwenDiTConfig
from qwenimg.common.precision.precision import parse
from qwenimg.common.weights import keys, streaming

SIDE, TEXT = 32, 64  # tokens


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
        made = self.engine.numpy(self.opened.predict(self.latents, self.condition, self.modulation, 0))
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return bytes(made.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    config = QwenDiTConfig(num_layers=asked.layers)
    with tempfile.TemporaryDirectory() as folder:
        stored = qwen_dit.manifest(config)
        path = write_weights(Path(folder) / "model.safetensors", stored, "BF16")
        engine = backends.load(asked.backend)
        precision = parse(asked.precision, on_gpu=False)
        plan = keys.plan(path, "transformer", stored, uses=qwen_dit.uses).stored(precision)
        streamed = streaming.fitting(plan, qwen_dit.NETWORK.streamable, 0)
        arms = {"resident": Arm(engine, config, plan, precision), "streamed": Arm(engine, config, streamed, precision)}
        assert len(streaming.streamed_blocks(streamed)) == asked.layers
        for i in range(asked.rounds + 1):
            order = list(arms.values()) if i % 2 else list(arms.values())[::-1]
            first, second = (arm.step() for arm in order)
            assert first == second, "the bits differ"
            if i == 0:  # every block is read for the first time and checked
                for arm in arms.values():
                    arm.cpu.clear()
                    arm.wall.clear()
    rows = []
    for name, arm in arms.items():
        cpu, wall = (
            median(b / a for a, b in zip(getattr(arms["resident"], k), getattr(arm, k), strict=True))
            for k in ("cpu", "wall")
        )
        rows.append((name, f"{median(arm.cpu):.1f} s", f"{cpu:.2f}", f"{median(arm.wall):.1f} s", f"{wall:.2f}"))
    text = table(("blocks", "CPU time", "ratio", "wall", "ratio"), rows)
    about = (
        f"{engine.device}, {precision.name}, {asked.layers} layers, {SIDE**2 + TEXT:,} tokens, median of {asked.rounds}"
    )
    print(f"{about}\n{text}")
    if not asked.dry:
        write("memory.md", "streamed", f"{about}, in turn; the bits are equal:\n\n{text}")


if __name__ == "__main__":
    main()
