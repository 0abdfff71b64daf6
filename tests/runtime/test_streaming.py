"""Blocks that are streamed: the same bits as resident ones on both backends, within the plan, and read ahead."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import weakref
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import random_folders
from random_model import DIT, TEXT, write_random_model
from support.crossed import crossed
from support.opened_parts import network_of
from support.pretend_device import pretend_engine, pretending

import qwenimg
from qwenimg import DoesNotFit, ModelError, Pipeline, UsageError, backends
from qwenimg.common.base.safe_files import OpenFile
from qwenimg.common.conversion import convert
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.precision.residency import ALWAYS, STREAMED
from qwenimg.common.runtime.read_ahead import Order, ReadAhead
from qwenimg.common.weights import streaming
from qwenimg.common.weights.storage import Packed

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


def denoiser(pipe: Pipeline) -> Any:
    return next(part for part in pipe.model.checkpoint.components.values() if part.role == "transformer")


def limited(pipe: Pipeline) -> list[int]:
    """Lets the denoiser have room for about half of its blocks and the text encoder none, whatever a step takes, and
    tells how many blocks each loading streams."""
    counts: list[int] = []
    open_, fitted, component = pipe.engine.open, pipe.runtime.with_streaming, denoiser(pipe)
    plan = pipe.runtime.load_plan(component)
    blocks = streaming.blocks(plan, component.streamable)
    room = streaming.peak_weight_bytes(plan, None) - sum(e.nbytes for block in blocks.values() for e in block) // 2

    def fit(component: Any, _: int) -> Any:
        return fitted(component, room if component.role == "transformer" else 0)

    def watched(network: str, config: Any, plan: Any, precision: Any) -> Any:
        counts.append(len(streaming.streamed_blocks(plan)))
        opened = open_(network, config, plan, precision)
        if pipe.backend == "cpu" and not any(isinstance(e.storage, Packed) for e in plan.entries.values()):
            there = {name for name, value in opened.model.named_parameters() if not value.is_meta}
            assert there == plan.when(ALWAYS).entries.keys(), "only what stays is read while it is opened"
        return opened

    pipe.runtime.max_memory = 2**40
    pipe.runtime.with_streaming = fit
    pipe.engine.open = watched
    return counts


@pytest.mark.parametrize(("backend", "precision"), crossed(["cpu", "mlx"], ["fp32", "bf16"]))
@pytest.mark.sample(1)
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


# Those of FLUX.1 and of Qwen-Image-Edit are streamed in the tests of their families.
OTHERS = ("z-image", "flux2-base", "sd3", "pixart", "auraflow", "sana", "hunyuan")


@pytest.mark.parametrize(("kind", "backend"), crossed(OTHERS, ["cpu", "mlx"]))
@pytest.mark.sample(0)
def test_blocks_of_other_transformers(tiny: dict[str, Path], kind: str, backend: str) -> None:
    resident = qwenimg.load(tiny[kind], backend=backend, precision="fp32")
    streamed = qwenimg.load(tiny[kind], backend=backend, precision="fp32")
    limited(streamed)
    for seed in (5, 6):
        assert drawn(streamed, seed=seed) == drawn(resident, seed=seed)
    paths = network_of(streamed, "transformer").streamed.blocks
    print(f"{backend} {kind}: streamed {', '.join(paths)}")
    assert len(paths) >= 2
    streamed.close()
    resident.close()


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_unet_is_streamed_bit_for_bit(folders: dict[str, Path], backend: str, kind: str) -> None:
    """Residual and transformer blocks of all levels, of unequal sizes; and of what encodes the text the layers."""
    resident = qwenimg.load(folders[kind], backend=backend, precision="bf16")
    streamed = qwenimg.load(folders[kind], backend=backend, precision="bf16")
    counts = limited(streamed)
    for seed in (5, 6):
        assert drawn(streamed, seed=seed) == drawn(resident, seed=seed)
    print(f"{backend} {kind}: blocks streamed {counts}")
    paths = network_of(streamed, "unet").streamed.blocks
    assert counts[-2] == len(paths) >= 6 and {path.split(".")[-2] for path in paths} >= {
        "resnets",
        "transformer_blocks",
    }
    assert len({sum(e.nbytes for e in block) for block in paths.values()}) > 2
    for pipe in (streamed, resident):
        model = weakref.ref(network_of(pipe, "unet").model)
        gc.disable()
        pipe.free_transformer()
        gc.enable()
        assert model() is None, "freed at once, not when cycles are collected"
        pipe.close()


@pytest.mark.parametrize("kind", ["qwen", "sd15"])
@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
def test_a_step_cache_streams_the_same_bits(folder: Path, folders: dict[str, Path], backend: str, kind: str) -> None:
    """A call that reuses leaves blocks out, so that what is read ahead is not what is next."""
    path, name = (folder, "transformer") if kind == "qwen" else (folders[kind], "unet")
    resident, streamed = (qwenimg.load(path, backend=backend, precision="fp32") for _ in range(2))
    limited(streamed)
    asked: dict[str, Any] = {"steps": 4, "cached_calls": "2,4"}
    assert drawn(streamed, **asked) == drawn(resident, **asked) != drawn(resident, steps=4)
    assert len(network_of(streamed, name).streamed.blocks) >= 3


@pytest.mark.parametrize(("kind", "index"), [("qwen", 1), ("sd15", 1)])
@pytest.mark.sample(0)
def test_on_a_device_of_its_own_memory(
    folder: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, index: int
) -> None:
    """By way of the host's memory into two buffers."""
    path, name = (folder, "transformer") if kind == "qwen" else (folders[kind], "unet")
    with pretending():
        monkeypatch.setattr(backends, "load", lambda name: pretend_engine())
        resident = qwenimg.load(path, backend="cpu", precision="fp32")
        streamed = qwenimg.load(path, backend="cpu", precision="fp32")
        counts = limited(streamed)
        assert streamed.engine.device == "a pretend accelerator"
        assert drawn(streamed) == drawn(resident) and counts[index] >= 3
        source = network_of(streamed, name).streamed.source
        devices = {buffer.device.type for buffer in source._buffers}
        assert devices == {"pretend"} and len(source._buffers) == 2 and len(source._host) == counts[index]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
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
    entries = streaming.streamed_blocks(network_of(pipe, "transformer").plan)
    per_pass = sum(len(block) for block in entries.values())
    passes = ASKED["steps"] * 2
    print(f"{backend}: {len(threads)} tensors for {passes} passes over {counts[1]} blocks, {per_pass} tensors")
    assert {name.split("_")[0] for name in threads} == {"read-ahead"}
    assert abs(len(threads) - passes * per_pass) <= per_pass // counts[1]  # and the one that is read ahead at the end
    if backend == "cpu":
        model = network_of(pipe, "transformer").model
        there = {name for name, value in model.named_parameters() if not value.is_meta}
        assert not there & {entry.name for block in entries.values() for entry in block}
    pipe.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(0)
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


def test_what_was_read_goes_before_the_block_computes(folder: Path) -> None:
    """MLX would make a block's float32 weights in its forward, and keep the bytes of its file beside them until then:
    a streamed UNet was 12 % over its plan."""
    import mlx.core as mx

    from qwenimg.backends.mlx import load

    pipe = qwenimg.load(folder, backend="mlx", precision="fp32")
    entry = next(
        e for e in pipe.runtime.load_plan(pipe.model.checkpoint["transformer"]).entries.values() if len(e.shape) == 2
    )
    assert entry.dtype == "bfloat16" and entry.storage.dtype == "float32"
    before = mx.get_active_memory()
    (kept,) = load.converted(entry, load.fetched_again(entry))
    held = mx.get_active_memory() - before
    print(f"held {held} of {entry.nbytes}")
    assert kept.dtype == mx.float32 and held >= entry.nbytes, "not made yet"
    assert held <= entry.nbytes + 4096, "the file's bytes are held as well"  # of a page each
    pipe.close()


@pytest.mark.sample(0)
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
    with pytest.raises(DoesNotFit, match=r"takes .* in fp32, --max-memory 100\.0 kB leaves 87\.5 kB"):
        drawn(small)
    small.close()
    with pytest.raises(UsageError, match="--max-memory"):
        qwenimg.load(folder, backend="cpu", max_memory="little")


def test_what_is_streamed(folder: Path) -> None:
    pipe = qwenimg.load(folder, backend="cpu", precision="fp32")
    component = denoiser(pipe)
    plan, streamable = pipe.runtime.load_plan(component), component.streamable
    block = sum(entry.nbytes for entry in streaming.blocks(plan, streamable)["transformer_blocks.0"])
    whole = streaming.peak_weight_bytes(plan, None)
    assert whole == plan.when(ALWAYS).nbytes
    for count in range(3, LAYERS + 1):
        budget = whole - (count - 2) * block
        found = streaming.stream_to_fit(plan, streamable, budget, None)
        numbers = sorted(int(path.rpartition(".")[2]) for path in streaming.streamed_blocks(found))
        gaps = {b - a for a, b in pairwise(numbers)}
        assert (
            len(numbers) == count and streaming.peak_weight_bytes(found, None) <= budget and max(gaps) - min(gaps) <= 1
        )
        assert (
            streaming.peak_weight_bytes(streaming.stream_to_fit(plan, streamable, budget - 1, None), None) < budget
            or count == LAYERS
        )
    assert streaming.stream_to_fit(plan, streamable, whole, None) is plan
    assert len(streaming.streamed_blocks(streaming.stream_to_fit(plan, streamable, 0, None))) == LAYERS
    assert {e.residency for e in found.entries.values() if e.name.startswith("transformer_blocks")} >= {STREAMED}
    pipe.close()


def test_what_of_a_unet_is_streamed(folders: dict[str, Path]) -> None:
    """Never more in memory than asked where that can be, and never more than the whole."""
    pipe = qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32")
    component = denoiser(pipe)
    plan, streamable = pipe.runtime.load_plan(component), component.streamable
    whole, least = (
        streaming.peak_weight_bytes(plan, None),
        streaming.peak_weight_bytes(streaming.stream_to_fit(plan, streamable, 0, None), None),
    )
    counts = []
    for share in range(11):
        budget = least + (whole - least) * share // 10
        found = streaming.stream_to_fit(plan, streamable, budget, None)
        counts.append(len(streaming.streamed_blocks(found)))
        assert least <= streaming.peak_weight_bytes(found, None) <= budget
    kept = {
        name for name, e in streaming.stream_to_fit(plan, streamable, 0, None).entries.items() if e.residency is ALWAYS
    }
    print(f"{least} to {whole} bytes: streamed {counts}; kept {len(kept)} of {len(plan.entries)} weights")
    assert counts[-1] == 0 and counts == sorted(counts, reverse=True)
    assert kept >= {name for name in plan.entries if "attn2.to_k" in name or "time" in name.split(".")[0]}
    pipe.close()


def test_read_ahead() -> None:
    def read(path: str) -> str:
        if path == "gone":
            raise OSError("gone")
        return path.upper()

    ahead = ReadAhead(read)
    ahead.start("a")
    assert ahead.take("a") == "A" and ahead.take("b") == "B"
    ahead.start("c")
    assert ahead.take("d") == "D"
    ahead.start("gone")
    with pytest.raises(OSError, match="gone"):
        ahead.take("gone")


def test_order_is_that_of_the_pass_before() -> None:
    order = Order()
    assert [order.next(path) for path in "abc"] == [None, None, None]
    assert [order.next(path) for path in "abc"] == ["b", "c", "a"]
    assert [order.next(path) for path in "acb"] == ["b", "a", "c"]
    assert [order.next(path) for path in "acb"] == ["c", "b", "a"]


@pytest.mark.parametrize(("backend", "quantize"), crossed(["cpu", "mlx"], [None, "8"]))
@pytest.mark.sample(0)
def test_blocks_are_read_into_the_same_two_pieces(
    folder: Path, tmp_path: Path, backend: str, quantize: str | None
) -> None:
    """New memory, which the system clears, took longer than reading. Of codes too, where a file has them."""
    path = folder
    if quantize is not None:
        path = tmp_path / "coded"
        convert.convert(folder, path, LoadOptions(quantize=quantize), Mock())
    pipe = qwenimg.load(path, backend=backend, precision="fp32")
    limited(pipe)
    first = drawn(pipe)
    stream = network_of(pipe, "transformer").streamed
    buffer = stream.source._buffer if backend == "cpu" else stream._buffer
    before = [id(memory) for memory, _ in buffer._pieces]
    assert drawn(pipe) == first and [id(memory) for memory, _ in buffer._pieces] == before and len(set(before)) == 2
    pipe.close()


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.sample(1)
def test_a_file_that_changes_between_passes_is_told(folder: Path, tmp_path: Path, backend: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    pipe = qwenimg.load(copy, backend=backend, precision="fp32")
    limited(pipe)
    drawn(pipe)
    for file in (copy / "transformer").glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    with pytest.raises(ModelError, match="changed while it was being read"):
        drawn(pipe)
    pipe.close()


@pytest.mark.parametrize(
    ("backend", "stored", "ahead"), [("cpu", "F32", 4), ("cpu", "BF16", 4), ("mlx", "F32", 4), ("mlx", "BF16", 2)]
)
@pytest.mark.sample(0)
def test_a_block_is_planned_as_it_is_read_ahead(tmp_path: Path, backend: str, stored: str, ahead: int) -> None:
    """In float32. MLX has `ahead` bytes a value, as the file does: it puts a convolution's values in another order
    afterwards; torch reads into the memory that computes."""
    small = replace(random_folders.SD15, block_out_channels=(32, 64, 64, 64))
    random_folders.write_folder(tmp_path / "model", "sd15", stored, unet=small)
    pipe = qwenimg.load(tmp_path / "model", backend=backend, precision="fp32")
    component, moved = denoiser(pipe), pipe.engine.workspace.moved
    plan = streaming.stream_to_fit(pipe.runtime.load_plan(component), component.streamable, 0, moved)
    values = max(sum(prod(e.shape) for e in block) for block in streaming.streamed_blocks(plan).values())
    assert streaming.in_flight_bytes(plan, moved) == values * (4 + ahead)
    assert streaming.in_flight_bytes(plan, None) == values * (4 + 4), "a card gets it as it is kept"
    pipe.close()
