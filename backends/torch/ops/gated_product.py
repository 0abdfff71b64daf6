"""A linear layer with GEGLU at its end as one kernel, in Triton, for NVIDIA's cards in 16 bit.

Torch's product writes 2C numbers for each row, of which a second kernel makes C. Here a tile of values and the tile of
its gates are summed side by side, and what is written is made of both sums, rounded once. Whether that is faster than
torch's faster product with a pass behind it depends on the card and on the shape: both are timed at the first call of a
shape, and what was found is kept, so that a machine always computes a shape in one way.

Not run on a card so far: interpreted on a CPU, and compiled for cards of capability 8.0 and 9.0
(`tests/networks/test_gated_product.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from qwenimg.backends.torch.ops.whole import CACHE
from qwenimg.common.base.atomic_files import write_atomic
from qwenimg.common.base.errors import QwenimgError

FILE = "gated-products.json"  # in the folder of what is compiled
GROUP = 8  # rows of tiles that share what they read
PASS = 1024  # numbers of one program of the pass
RUNS = 20  # of which the time is taken


class Tile(NamedTuple):
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# The first two leave no register of Ampere's and Ada's to memory, the third is for Hopper's larger tiles.
TILES = (Tile(128, 64, 32, 4, 4), Tile(64, 64, 64, 4, 3), Tile(128, 128, 64, 8, 3))
Way = Tile | None  # None: torch's product, and a pass
WAYS: tuple[Way, ...] = (None, *TILES)


@triton.jit
def _geglu(value, gate):
    """In float32, by the error function."""
    return value * 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def _product(
    x, weight, bias, out, M, C, K, x_row, weight_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x [M K], weight [2C K], bias [2C] -> out [M C]; a program makes a tile [ROWS COLUMNS]."""
    program, across = tl.program_id(0), tl.cdiv(C, COLUMNS)
    group = program // (GROUP * across)
    height = min(tl.cdiv(M, ROWS) - group * GROUP, GROUP)
    row = group * GROUP + program % (GROUP * across) % height
    m = row * ROWS + tl.arange(0, ROWS)
    c = program % (GROUP * across) // height * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, INNER)
    xs = x + m[:, None].to(tl.int64) * x_row + k[None, :]
    values = weight + c[None, :] * weight_row + k[:, None]
    gates = values + C * weight_row
    value = tl.zeros((ROWS, COLUMNS), tl.float32)
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, K, INNER):
        there = k < K - done
        left = tl.load(xs + done, mask=(m[:, None] < M) & there[None, :], other=0.0)
        inside = (c[None, :] < C) & there[:, None]
        value = tl.dot(left, tl.load(values + done, mask=inside, other=0.0), value)
        gate = tl.dot(left, tl.load(gates + done, mask=inside, other=0.0), gate)
    value += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias + C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    to = out + m[:, None].to(tl.int64) * C + c[None, :]
    tl.store(to, _geglu(value, gate).to(out.dtype.element_ty), mask=(m[:, None] < M) & (c[None, :] < C))


@triton.jit
def _pass(both, out, C, COLUMNS: tl.constexpr):
    """both [M 2C] -> out [M C]; a program makes COLUMNS numbers of a row."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(both + row * 2 * C + c, mask=c < C, other=0.0).to(tl.float32)
    gate = tl.load(both + row * 2 * C + C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + row * C + c, _geglu(value, gate).to(out.dtype.element_ty), mask=c < C)


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [... in], weight [2C in] -> [... C], by what is fastest for these shapes here."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return by(_fastest(rows, weight, bias), rows, weight, bias).unflatten(0, x.shape[:-1])


def by(way: Way, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [M K] -> [M C]."""
    return by_torch(x, weight, bias) if way is None else by_tiles(way, x, weight, bias)


def by_tiles(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [M K] -> [M C]: one kernel."""
    M, C = x.shape[0], weight.shape[0] // 2
    out = x.new_empty(M, C)
    grid = (triton.cdiv(M, tile.rows) * triton.cdiv(C, tile.columns),)
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "GROUP": GROUP}
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    _product[grid](x, weight, bias, out, M, C, x.shape[1], x.stride(0), weight.stride(0), **sizes, **how)
    return out


def by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [M K] -> [M C]: torch's product, and one pass."""
    both = F.linear(x, weight, bias)
    out = x.new_empty(len(both), both.shape[1] // 2)
    _pass[(len(both), triton.cdiv(out.shape[1], PASS))](both, out, out.shape[1], COLUMNS=PASS)
    return out


# Which is fastest


def _fastest(x: Tensor, weight: Tensor, bias: Tensor) -> Way:
    """The same for all numbers of rows with one power of two above them."""
    known = _known()
    rows, shape = 1 << (x.shape[0] - 1).bit_length(), "x".join(map(str, weight.shape))
    name = f"{torch.cuda.get_device_name(x.device)}, {x.dtype}, {rows} rows, {shape}, triton {triton.__version__}"
    if name not in known:
        if torch.cuda.is_current_stream_capturing():
            return None
        known[name] = min(WAYS, key=lambda way: _seconds(way, x, weight, bias))
        _keep(known)
    return known[name]


def _seconds(way: Way, x: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Of one call; infinite where the card has too little of what it needs."""
    try:
        by(way, x, weight, bias)
    except triton.TritonError:
        return inf
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(RUNS):
        by(way, x, weight, bias)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / RUNS


@cache
def _known() -> dict[str, Way]:
    """What was found in runs before this one; where the file says anything else, nothing."""
    by_text = {str(way): way for way in WAYS}
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return {name: by_text[way] for name, way in found.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def _keep(known: dict[str, Way]) -> None:
    with contextlib.suppress(OSError, QwenimgError):  # then the next run finds it anew
        _file().parent.mkdir(parents=True, exist_ok=True)
        data = {name: str(way) for name, way in known.items()}
        write_atomic(_file(), json.dumps(data, indent=1).encode(), overwrite=True)


def _file() -> Path:
    return Path(os.environ[CACHE]) / FILE
