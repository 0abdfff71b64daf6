"""Blocks that are streamed: the same bits as resident ones on both backends, within the plan, and read ahead."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pretend_device import pretend_engine, pretending
from random_model import DIT, TEXT, write_random_model

import qwenimg
from qwenimg import DoesNotFit, Pipeline, UsageError, backends
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.precision.residency import ALWAYS, STREAMED
from qwenimg.common.runtime.read_ahead import ReadAhead, cycle
from qwenimg.common.weights import streaming

ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "guidance": 3.0, "seed": 5}
LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight blocks of 130 kB, and six layers of the text encoder."""
    from dataclasses import replace

    made = tmp_path_factory.mktemp("model") / "random"
    dit, text = replace(DIT, num_layers=LAYERS), replace(TEXT, num_hidden_layers=6)
    write_random_model(made, dit=dit, text=text, dtype="bfloat16")
    return made


def drawn(pipe: Pipeline, **more: Any) -> bytes:
    made = pipe("a red circle", **(ASKED | more))
    return made.latents.tobytes() + made.pixels.tobytes()


def least(pipe: Pipeline) -> int:
    """Room in which some of the blocks stay and some are streamed."""
    component = pipe.model.checkpoint["transformer"]
    blocks = streaming.blocks(pipe.runtime.plan(component), component.stack)
    return 4 * sum(entry.nbytes for entry in blocks[0])


def limited(pipe: Pipeline) -> list[int]:
    """Lets the transformer have little room, whatever a step takes, and tells how many blocks each loading streams."""
    counts: list[int] = []
    opened, fitted = pipe.engine.open, pipe.runtime.fitted

    def fit(component: Any, room: int) -> Any:
        return fitted(component, least(pipe) if component.role == "transformer" else 0)

    def watched(network: str, config: Any, plan: Any, precision: Any) -> Any:
        counts.append(len(streaming.streamed_blocks(plan)))
        return opened(network, config, plan, precision)

    pipe.runtime.max_memory = 2**40
    pipe.runtime.fitted = fit
    pipe.engine.open = watched
    return counts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_streamed_is_resident_bit_for_bit(folder: Path, backend: str, precision: str) -> None:
    """Over several steps and pictures, so that blocks are read ahead and round the cycle."""
    resident = qwenimg.load(folder, backend=backend, precision=precision)
    streamed = qwenimg.load(folder, backend=backend, precision=precision)
    counts = limited(streamed)
    for seed in (5, 6):
        assert drawn(streamed, seed=seed) == drawn(resident, seed=seed)
    print(f"{backend} {precision}: streamed of the text encoder {counts[0]} layers, of the transformer {counts[1]}")
    assert counts[0] == 6 and 3 <= counts[1] < LAYERS
    streamed.close()
    resident.close()


def test_on_a_device_of_its_own_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the host's memory into two sets of buffers."""
    with pretending():
        monkeypatch.setattr(backends, "load", lambda name: pretend_engine())
        resident = qwenimg.load(folder, backend="cpu", precision="fp32")
        streamed = qwenimg.load(folder, backend="cpu", precision="fp32")
        counts = limited(streamed)
        assert streamed.engine.device == "a pretend accelerator"
        assert drawn(streamed) == drawn(resident) and counts[1] >= 3
        source = streamed.model._transformer.streamed.source
        devices = {t.device.type for buffers in source._buffers for one in buffers for t in one}
        assert devices == {"pretend"} and len(source._buffers) == 2 and len(source._host) == counts[1]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_only_the_file_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """By a thread of its own, and what is taken away leaves no memory behind."""
    pipe = qwenimg.load(folder, backend=backend, precision="fp32")
    counts = limited(pipe)
    drawn(pipe)
    threads: list[str] = []
    fill = OpenFile.fill

    def watched(self: OpenFile, view: memoryview, begin: int) -> None:
        threads.append(threading.current_thread().name)
        fill(self, view, begin)

    monkeypatch.setattr(OpenFile, "fill", watched)
    drawn(pipe)
    entries = streaming.streamed_blocks(pipe.model._transformer.plan)
    per_pass = sum(len(block) for block in entries.values())
    passes = ASKED["steps"] * 2
    print(f"{backend}: {len(threads)} tensors for {passes} passes over {counts[1]} blocks, {per_pass} tensors")
    assert {name.split("_")[0] for name in threads} == {"read-ahead"}
    assert abs(len(threads) - passes * per_pass) <= per_pass // counts[1]  # and the one that is read ahead at the end
    if backend == "cpu":
        model = pipe.model._transformer.model
        there = {name for name, value in model.named_parameters() if not value.is_meta}
        assert not there & {entry.name for block in entries.values() for entry in block}
    pipe.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_lora_goes_into_streamed_blocks(folder: Path, tmp_path: Path, backend: str) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    width, rng = DIT.num_attention_heads * DIT.attention_head_dim, np.random.default_rng(1)
    file = tmp_path / "style.safetensors"
    start = "transformer.transformer_blocks.3.attn.to_q."
    parts = {"lora_A": (2, width), "lora_B": (width, 2)}
    save_file({f"{start}{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in parts.items()}, file)
    resident = qwenimg.load(folder, backend=backend, precision="fp32")
    streamed = qwenimg.load(folder, backend=backend, precision="fp32")
    limited(streamed)
    plain = drawn(streamed)
    assert drawn(streamed, lora=str(file)) == drawn(resident, lora=str(file)) != plain
    assert drawn(streamed) == plain
    streamed.close()
    resident.close()


def test_the_real_budget(folder: Path) -> None:
    """Through --max-memory itself: planned, drawn, and refused where not even two blocks fit."""
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    whole = pipe.runtime.weight_bytes(pipe.model.checkpoint["transformer"])
    peak = pipe.estimate("a red circle", **ASKED).memory
    bits = drawn(pipe)
    pipe.close()
    streamed = qwenimg.load(folder, backend="cpu", precision="fp32", max_memory=peak - whole // 3)
    told: list[str] = []
    streamed.runtime.notify = lambda kind, text: told.append(text)
    assert streamed.estimate("a red circle", **ASKED).memory <= peak - whole // 3
    assert drawn(streamed) == bits and any("blocks streamed" in line for line in told), told
    streamed.close()
    small = qwenimg.load(folder, backend="cpu", precision="fp32", max_memory="100kB")
    with pytest.raises(DoesNotFit, match=r"takes .* in fp32, 100\.0 kB are free"):
        drawn(small)
    small.close()
    with pytest.raises(UsageError, match="--max-memory"):
        qwenimg.load(folder, backend="cpu", max_memory="little")


def test_what_is_streamed(folder: Path) -> None:
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    component = pipe.model.checkpoint["transformer"]
    plan, stack = pipe.runtime.plan(component), component.stack
    block = sum(entry.nbytes for entry in streaming.blocks(plan, stack)[0])
    whole = streaming.held(plan)
    assert whole == plan.when(ALWAYS).nbytes
    for count in range(3, LAYERS + 1):
        # a block as it lies in the file takes half of what it takes in float32
        budget = whole - count * block + block * 3 // 2
        found = streaming.fitting(plan, stack, budget)
        numbers = sorted(streaming.streamed_blocks(found))
        gaps = {b - a for a, b in pairwise(numbers)}
        assert len(numbers) == count and streaming.held(found) <= budget and max(gaps) - min(gaps) <= 1
        assert streaming.held(streaming.fitting(plan, stack, budget - 1)) < budget or count == LAYERS
    assert streaming.fitting(plan, stack, whole) is plan
    assert len(streaming.streamed_blocks(streaming.fitting(plan, stack, 0))) == LAYERS
    assert {e.residency for e in found.entries.values() if e.name.startswith(stack)} >= {STREAMED}
    pipe.close()


def test_read_ahead() -> None:
    def read(number: int) -> int:
        if number == 7:
            raise OSError("gone")
        return 10 * number

    ahead = ReadAhead(read)
    ahead.start(3)
    assert ahead.take(3) == 30 and ahead.take(4) == 40
    ahead.start(5)
    assert ahead.take(6) == 60
    ahead.start(7)
    with pytest.raises(OSError, match="gone"):
        ahead.take(7)
    assert cycle([4, 1, 9]) == {1: 4, 4: 9, 9: 1} and cycle([]) == {}
