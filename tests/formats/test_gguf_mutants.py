"""Damaged GGUF files: each is refused in one line or read, with the same verdict and the same bits on both backends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from support.file_mutants import assert_line, campaign, damaged, read_alike
from support.gguf_files import array, info, key, random_blocks, raw, string

from qwenimg.common.base.errors import ModelError
from qwenimg.common.formats.gguf_types import TYPES
from qwenimg.common.formats.headers import open_header
from qwenimg.common.weights import keys, quantize

NUMBERS = {type.name: number for number, type in TYPES.items()}
SHAPES = {
    "a.weight": (3, 256),
    "b.weight": (2, 96),
    "c.weight": (4, 64),
    "d.weight": (2, 256),
    "bias": (7,),
    "conv": (4, 8, 3, 3),
}


def sample() -> bytes:
    """A little of all that there is: keys of several types, a vocabulary, a true shape, six types of tensors."""
    rng = np.random.default_rng(1)
    tensors = {
        "a.weight": ("Q4_K", random_blocks("Q4_K", 3, 256, 1)),
        "b.weight": ("Q8_0", random_blocks("Q8_0", 2, 96, 2)),
        "c.weight": ("Q5_1", random_blocks("Q5_1", 4, 64, 3)),
        "d.weight": ("IQ4_XS", random_blocks("IQ4_XS", 2, 256, 4)),
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


def outcome(path: Path) -> str:
    """What becomes of a file, checked: `header`, `plan` or `values` refused, or `read`."""
    try:
        open_header(path).file.close()
    except ModelError as error:
        assert_line(str(error), path.name)
        return "header"
    theirs = GGUFReader(path)  # which must take it too; the arrays of one that we take end within the file
    try:
        planned = keys.plan(path, "transformer", SHAPES, architectures=frozenset({"qwen_image"}))
    except ModelError as error:
        assert_line(str(error), path.name)
        return "plan"
    assert {tensor.name for tensor in theirs.tensors} == SHAPES.keys()
    return read_alike(quantize.keep(planned, frozenset()), path.name)


def run(path: Path, count: int, seed: int) -> Counter[str]:
    whole, chance = sample(), random.Random(seed)
    path.write_bytes(whole)
    header = min(stored.begin for stored in open_header(path).tensors.values())
    assert outcome(path) == "read"

    def mutants() -> Iterator[Callable[[], str]]:
        for _ in range(count):
            content = damaged(whole, header, chance)
            if content[:4] == b"GGUF":  # else a file of another format
                path.write_bytes(content)
                yield lambda: outcome(path)

    found = campaign(mutants(), seed)
    assert found.keys() >= {"header", "plan", "read"}
    return found


@pytest.mark.sample(0)
def test_mutants(tmp_path: Path) -> None:
    run(tmp_path / "m.gguf", 400, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_twenty_thousand_mutants(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "m.gguf", 2200, seed)
