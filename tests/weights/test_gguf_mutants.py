"""Damaged GGUF files: each is refused in one line or read, with the same verdict and the same bits on both backends."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf_files import array, info, key, random_blocks, raw, string

from qwenimg.backends.mlx import load as mlx_load
from qwenimg.backends.torch import load as torch_load
from qwenimg.common.base.errors import ModelError
from qwenimg.common.weights import keys, quantise
from qwenimg.common.weights.gguf_types import TYPES
from qwenimg.common.weights.headers import read_header
from qwenimg.common.weights.plan import Entry, LoadPlan, read_codes
from qwenimg.common.weights.storage import Packed

SECONDS, MEMORY = 1.0, 50e6
NUMBERS = {type.name: number for number, type in TYPES.items()}
SHAPES = {"a.weight": (3, 256), "b.weight": (2, 96), "c.weight": (4, 64), "bias": (7,), "conv": (4, 8, 3, 3)}
EXTREMES = (0, 1, 2, 3, 8, 9, 31, 32, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def sample() -> bytes:
    """A little of all that there is: keys of several types, a vocabulary, a true shape, five types of tensors."""
    rng = np.random.default_rng(1)
    tensors = {
        "a.weight": ("Q4_K", random_blocks("Q4_K", 3, 256, 1)),
        "b.weight": ("Q8_0", random_blocks("Q8_0", 2, 96, 2)),
        "c.weight": ("Q5_1", random_blocks("Q5_1", 4, 64, 3)),
        "bias": ("F32", rng.standard_normal(7).astype("<f4")),
        "conv": ("F16", rng.standard_normal((9, 32)).astype("<f2")),
    }
    dims = {name: SHAPES[name][::-1] for name in tensors} | {"conv": (32, 9)}
    infos, data = [], b""
    for name, (type, values) in tensors.items():
        infos.append(info(name, dims[name], NUMBERS[type], len(data)))
        data += values.tobytes()
        data += bytes(-len(data) % 32)
    heading = (
        key("general.architecture", 8, string("qwen_image")),
        key("general.alignment", 4, (32).to_bytes(4, "little")),
        key("general.quantization_version", 4, (2).to_bytes(4, "little")),
        array("tokenizer.ggml.tokens", 8, 4, b"".join(string(word) for word in ("a", "bc", "", "é"))),
        array("tokenizer.ggml.scores", 6, 3, bytes(12)),
        array("comfy.gguf.orig_shape.conv", 5, 4, np.array(SHAPES["conv"], "<i4").tobytes()),
        key("flag", 7, b"\1"),
    )
    return raw(heading, tuple(infos), data)


def mutant(whole: bytes, header: int, chance: random.Random) -> bytes:
    """One to three changes, nine in ten of them in the header."""
    changed = bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at = chance.randrange(min(header, len(changed)) if chance.random() < 0.9 else len(changed))
        kind = chance.randrange(6)
        if kind == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at] = chance.randrange(256)
        elif kind == 2:
            size = chance.choice((4, 8))
            changed[at : at + size] = (chance.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 40)]
        elif kind == 4:
            changed[at:at] = changed[max(0, at - chance.randrange(1, 40)) : at]
        else:
            del changed[at:]
        if not changed:
            break
    return bytes(changed)


def on_torch(entry: Entry) -> np.ndarray:
    return torch_load.tensor(entry, torch.device("cpu")).float().numpy()


def on_mlx(entry: Entry) -> np.ndarray:
    made = np.array(mlx_load.tensor(entry).astype(mx.float32))
    return made.transpose(0, 3, 1, 2) if made.ndim == 4 else made


def verdict(plan: LoadPlan, load: Callable[[Entry], np.ndarray]) -> str | list[bytes]:
    """Of the whole file: its bits, or the line that refuses it."""
    try:
        return [
            b"".join(part.tobytes() for part in read_codes(entry))
            if isinstance(entry.storage, Packed)
            else load(entry).tobytes()
            for entry in plan.entries.values()
        ]
    except ModelError as error:
        return str(error)


def outcome(path: Path) -> str:
    """What becomes of a file, checked: `header`, `plan` or `values` refused, or `read`."""
    try:
        read_header(path).file.close()
    except ModelError as error:
        assert_line(str(error))
        return "header"
    theirs = GGUFReader(path)  # which must take it too; the arrays of one that we take end within the file
    try:
        planned = keys.plan(path, "transformer", SHAPES, architectures=frozenset({"qwen_image"}))
    except ModelError as error:
        assert_line(str(error))
        return "plan"
    plan = quantise.keep(planned, frozenset())
    assert {tensor.name for tensor in theirs.tensors} == SHAPES.keys()
    first, second = verdict(plan, on_torch), verdict(plan, on_mlx)
    plan.close()
    assert first == second
    if isinstance(first, str):
        assert_line(first)
        return "values"
    return "read"


def assert_line(text: str) -> None:
    assert text.isprintable() and "m.gguf" in text and len(text) <= 300, text


def run(path: Path, count: int, seed: int) -> Counter[str]:
    whole, chance = sample(), random.Random(seed)
    path.write_bytes(whole)
    header = min(stored.begin for stored in read_header(path).tensors.values())
    assert outcome(path) == "read"
    found: Counter[str] = Counter()
    tracemalloc.start()
    for number in range(count):
        content = mutant(whole, header, chance)
        if content[:4] != b"GGUF":
            continue  # a file of another format
        path.write_bytes(content)
        start = time.process_time()
        try:
            found[outcome(path)] += 1
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}") from error
        assert time.process_time() - start < SECONDS, number
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{sum(found.values())} mutants: {dict(found)}, {peak / 1e6:.1f} MB at most")
    assert peak < MEMORY and found.keys() >= {"header", "plan", "read"}
    return found


def test_mutants(tmp_path: Path) -> None:
    run(tmp_path / "m.gguf", 400, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_twenty_thousand_mutants(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "m.gguf", 2200, seed)
