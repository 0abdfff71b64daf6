"""Damaged files of weights in codes, as MLX, mflux and ComfyUI write them: refused in one line, or the same bits."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.file_mutants import EXTREMES, assert_line, campaign, damaged, read_alike
from support.refusals import safetensors_bytes, tensor

from qwenimg.common.base.errors import ModelError
from qwenimg.common.weights import keys, quantize

Shape = tuple[int, ...]
SIZES = {"F32": 4, "U32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "F8_E8M0"), 1
)
# Of each weight its true shape, and the tensors that hold it.
WEIGHTS: dict[str, tuple[Shape, dict[str, tuple[str, Shape]]]] = {
    "a": ((3, 256), {"weight": ("U32", (3, 32)), "scales": ("F16", (3, 4)), "biases": ("F16", (3, 4))}),
    "b": ((2, 96), {"weight": ("U32", (2, 24)), "scales": ("BF16", (2, 3)), "biases": ("BF16", (2, 3))}),
    "c": ((4, 64), {"weight": ("U32", (4, 12)), "scales": ("F32", (4, 1)), "biases": ("F32", (4, 1))}),
    "d": ((4, 64), {"weight": ("U32", (4, 8)), "scales": ("U8", (4, 2))}),
    "e": ((4, 32), {"weight": ("U32", (4, 4)), "scales": ("U8", (4, 2))}),
    "f": ((4, 16), {"weight": ("F8_E4M3", (4, 16)), "scale_weight": ("F32", ()), "scale_input": ("F32", ())}),
    "g": ((2, 8), {"weight": ("I8", (2, 8)), "weight_scale": ("F32", (2, 1))}),
    "h": ((3, 5), {"weight": ("F8_E5M2", (3, 5))}),
    "i": ((3, 32), {"weight": ("I8", (3, 32)), "weight_scale": ("F32", (3, 1))}),
    "j": ((3, 32), {"weight": ("I8", (3, 16)), "weight_scale": ("F32", (3,))}),
    "l": (
        (3, 32),
        {
            "weight": ("I8", (3, 16)),
            "weight_s_rel": ("F8_E4M3", (3, 2)),
            "weight_s_channel": ("F32", (3,)),
            "weight_codebook": ("F32", (16,)),
        },
    ),
    "m": (
        (3, 64),
        {
            "weight": ("I8", (3, 32)),
            "weight_scale": ("BF16", (1, 3)),
            "weight_zeros": ("BF16", (1, 3)),
        },
    ),
    "k.conv3d": ((4, 2, 3, 3, 3), {"weight": ("F16", (4, 3, 3, 3, 2)), "bias": ("BF16", (4,))}),
    "o": (
        (3, 32),
        {"weight": ("U32", (3, 4)), "scales": ("F16", (3, 1)), "biases": ("F16", (3, 1)), "rotation": ("U32", (1,))},
    ),
    "n": ((6, 1, 1), {"weight": ("F32", (6,))}),
}
SHAPES = {f"{layer}.weight": shape for layer, (shape, _) in WEIGHTS.items()} | {"k.conv3d.bias": (4,)}
DESCRIBED = {
    f"{layer}.comfy_quant": json.dumps(fields).encode()
    for layer, fields in {
        "g": {"format": "int8_tensorwise"},
        "i": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
        "j": {"format": "convrot_w4a4", "convrot_groupsize": 4},
        "l": {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 16},
        "m": {"format": "awq_w4a16", "group_size": 64},
    }.items()
}
LAST = ".conv3d."


class Held(NamedTuple):
    dtype: str
    shape: Shape
    data: bytes


def sample() -> dict[str, Held]:
    rng, made = np.random.default_rng(1), {}
    for layer, (_, tensors) in WEIGHTS.items():
        for part, (dtype, shape) in tensors.items():
            count = int(np.prod(shape))
            if dtype in ("F32", "F16", "BF16"):
                values = (rng.standard_normal(count) * 0.1).astype("<f2" if dtype == "F16" else "<f4")
                data = values.tobytes() if dtype != "BF16" else (values.view("<u4") >> 16).astype("<u2").tobytes()
            else:
                data = rng.integers(0, 64, count * SIZES[dtype], np.uint8).tobytes()
            made[f"{layer}.{part}"] = Held(dtype, shape, data)
    made |= {name: Held("U8", (len(text),), text) for name, text in DESCRIBED.items()}
    made["o.rotation"] = Held("U32", (1,), (16).to_bytes(4, "little"))
    made["scaled_fp8"] = Held("F8_E4M3", (0,), b"")
    return made


def file_of(tensors: dict[str, Held], notes: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": notes} if notes else {}
    at = 0
    for name, held in tensors.items():
        header[name] = tensor(held.shape, at, at + len(held.data), held.dtype)
        at += len(held.data)
    return safetensors_bytes(header, b"".join(held.data for held in tensors.values()))


def changed(whole: dict[str, Held], chance: random.Random) -> bytes:
    """A file that its header describes rightly, of which one to three tensors are not what they should be."""
    tensors, notes = dict(whole), {"quantization_level": "4", "mflux_version": "0.11.1"}
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = chance.choice(list(tensors))
        dtype, shape, data = tensors.pop(name)
        kind = chance.randrange(8)
        if kind == 1:
            name = chance.choice([*whole, f"{name}.x", name.replace("weight", "scales"), "\x1b[2J" * 99])
        elif kind == 2:
            dtype = chance.choice([other for other, size in SIZES.items() if size == SIZES[dtype]])
        elif kind == 3:
            shape = chance.choice(
                [shape[::-1], (len(data) // SIZES[dtype],), (*shape, 1), (1, *shape), shape + (0,) * 2]
            )
        elif kind == 4 and shape and shape[0] > 1:
            rows = chance.randrange(shape[0])
            data, shape = data[: rows * len(data) // shape[0]], (rows, *shape[1:])
        elif kind == 5 and data:
            at = chance.randrange(len(data))
            data = (data[:at] + chance.choice((b"\xff", b"\x7f\x80", b"\0" * 8)) + data[at:])[: len(data)]
        elif kind == 6:
            formats = ("float8_e4m3fn", "nvfp4", "int8_tensorwise", "convrot_w4a4", chance.choice(EXTREMES))
            field = chance.choice(("convrot_groupsize", "group_size", "params"))
            descriptor = {"format": chance.choice(formats), field: chance.choice(EXTREMES)}
            notes["_quantization_metadata"] = json.dumps({"layers": {chance.choice("abfghijlm"): descriptor}})
        elif kind == 7 and name in DESCRIBED:
            data = damaged(data, len(data), chance)
            shape = (len(data),)
        if kind:  # 0: it is left out
            empty = 0 in shape
            tensors[name] = Held(dtype, shape, b"" if empty else data)
    return file_of(tensors, notes)


def outcome(path: Path, name: str) -> str:
    """What becomes of it, checked: `plan` or `values` refused, or `read`."""
    try:
        plan = keys.plan(path, "transformer", SHAPES, channels_last=LAST)
    except ModelError as error:
        assert_line(str(error), name)
        return "plan"
    return read_alike(quantize.keep(plan, frozenset()), name)


def run(path: Path, count: int, seed: int) -> Counter[str]:
    """Half of them damaged in their bytes, half in what they hold."""
    whole, chance = sample(), random.Random(seed)
    raw = file_of(whole, {})
    path.write_bytes(raw)
    assert outcome(path, path.name) == "read"

    def mutants() -> Iterator[Callable[[], str]]:
        for number in range(count):
            header = 8 + int.from_bytes(raw[:8], "little")
            path.write_bytes(damaged(raw, header, chance) if number % 2 else changed(whole, chance))
            yield lambda: outcome(path, path.name)

    return campaign(mutants(), seed)


@pytest.mark.sample(0)
def test_mutants(tmp_path: Path) -> None:
    found = run(tmp_path / "m.safetensors", 300, 1)
    assert found.keys() == {"plan", "values", "read"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_twenty_thousand_mutants(tmp_path: Path, seed: int) -> None:
    run(tmp_path / "m.safetensors", 2000, seed)


@pytest.mark.sample(0)
def test_mutants_of_an_index(tmp_path: Path) -> None:
    """Of shards as mflux writes them: no other file is opened, and no name leads out of the folder."""
    chance, whole, names = random.Random(3), sample(), list(sample())
    shards = {f"{i}.safetensors": names[i::2] for i in range(2)}
    for shard, held in shards.items():
        (tmp_path / shard).write_bytes(file_of({name: whole[name] for name in held}, {}))
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index, path = json.dumps({"weight_map": weight_map}).encode(), tmp_path / "model.safetensors.index.json"
    path.write_bytes(index)
    assert outcome(tmp_path, "") == "read"

    places: list[object] = ["../a.safetensors", "/etc/passwd", 3, "", "x" * 400, "1.safetensors"]

    def mutants() -> Iterator[Callable[[], str]]:
        for number in range(300):
            moved = {"weight_map": weight_map | {chance.choice(names): chance.choice(places)}}
            path.write_bytes(damaged(index, len(index), chance) if number % 2 else json.dumps(moved).encode())
            yield lambda: outcome(tmp_path, "safetensors")

    found = campaign(mutants(), 3)
    assert found["plan"] > 200
