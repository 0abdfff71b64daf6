"""The plan of a picture, stage by stage, against what an allocator counts: that of the pretend accelerator.

Pictures are small, since attention there is one without a kernel, whose scores the plan does not have.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measure_memory import made
from pretend_device import MEMORY, pretend_engine, pretending
from random_model import DIT, TEXT, write_random_model

import qwenimg
from qwenimg import backends
from qwenimg.common.pipeline import ways

NEAR = 0.15  # of what is counted
LEAST = 100 * 10**6  # bytes of a stage that is held to it; of a smaller one arrays that never are on the device count
SIDE = {"width": 128, "height": 128, "steps": 1}
MARKS = {
    "loading text encoder": "text", "loading transformer": "denoise", "loading unet": "denoise",
    "loading vae decoder": "decode",
}  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch, path: Path, load: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of each stage the bytes that were planned and those that were counted; what Qwen-Image makes its modulation with
    is in the stage of its steps."""
    with pretending():
        monkeypatch.setattr(backends, "load", lambda name: pretend_engine())
        gc.collect()
        idle, peaks, stages = MEMORY.now, dict[str, int](), ["before"]

        def mark(kind: str, text: str) -> None:
            peaks[stages[-1]] = max(peaks.get(stages[-1], 0), MEMORY.peak - idle)
            stages.append(next((name for start, name in MARKS.items() if text.startswith(start)), stages[-1]))
            MEMORY.peak = MEMORY.now

        pipe = qwenimg.load(path, backend="cpu", precision="fp32", notify=mark, **load)
        planned = dict[str, int]()
        for stage in ways.needs(pipe.model, pipe.check("a red circle", **SIDE)).stages:
            name = stage.name.replace("modulation", "denoise")
            planned[name] = max(planned.get(name, 0), stage.peak)
        pipe("a red circle", **SIDE)
        mark("stage", "")
        pipe.close()
    return {name: (count, peaks[name]) for name, count in planned.items()}


def held_together(found: dict[str, tuple[int, int]], about: str) -> None:
    for name, (plan, count) in found.items():
        print(f"{about} {name}: planned {plan / 1e6:.1f} MB, counted {count / 1e6:.1f}, ratio {plan / count:.2f}")
    largest = tuple(max(column) for column in zip(*found.values(), strict=True))
    for plan, count in [largest, *(both for both in found.values() if max(both) > LEAST)]:
        assert abs(plan / count - 1) <= NEAR


@pytest.mark.parametrize("limit", ["20MB", pytest.param(None, marks=pytest.mark.slow)])
def test_a_small_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None) -> None:
    """Streamed with 40 % of its size, and whole."""
    dit = replace(DIT, num_layers=8, num_attention_heads=8, joint_attention_dim=TEXT.hidden_size)
    write_random_model(tmp_path / "model", dit=dit, dtype="bfloat16")
    held_together(counted(monkeypatch, tmp_path / "model", {"max_memory": limit}), f"limit {limit}:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "load"),
    [
        ("qwen", {}),
        ("qwen", {"quantize": "8"}),
        ("qwen", {"max_memory": "400MB"}),
        ("sd15", {}),
        ("sd15", {"max_memory": "258MB"}),
        ("sdxl", {"max_memory": "770MB"}),
    ],
)
def test_wide_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, load: dict[str, Any]) -> None:
    held_together(counted(monkeypatch, made(tmp_path, model), load), f"{model} {load}:")
