"""GEGLU at the end of a product, in Triton: interpreted here against float64, compiled for cards that are not here, and
which of its forms is taken where."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this machine")

# Rows, inputs and results: whole tiles, parts of one, more groups of tiles than one, a single row.
INTERPRETED = """
import torch
import torch.nn.functional as F
from qwenimg.backends.torch.ops import gated_product as gated

gated.GROUP = 2  # so that few rows are several groups
for rows, inputs, results in [(128, 64, 128), (77, 40, 72), (300, 24, 40), (1, 16, 8)]:
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(rows)
        x, weight, bias = (torch.randn(shape) for shape in ((rows, inputs), (2 * results, inputs), (2 * results,)))
        given = [each.to(dtype) for each in (x, weight / inputs**0.5, bias)]
        values, gate = F.linear(*(each.double() for each in given)).chunk(2, dim=-1)
        right = values * F.gelu(gate)
        for way in gated.WAYS:
            made = gated.by(way, *given)
            assert made.shape == right.shape and made.dtype == dtype
            error = float((made - right).norm() / right.norm())
            print(rows, inputs, results, dtype, "product" if way else "pass", error)
"""
# The largest share of float64's length: one rounding to float16, and float32's of the sums; before a pass, one more.
LIMITS = {
    ("torch.float16", "product"): 2.0**-11,
    ("torch.float16", "pass"): 2.0**-10,
    ("torch.float32", "product"): 2.0**-21,
    ("torch.float32", "pass"): 2.0**-21,
}


def run(source: str, *arguments: str, folder: Path, **environment: str) -> list[list[str]]:
    """The words of what a process of its own prints: Triton asks once, when it is imported, how kernels are to run."""
    there = {"PATH": os.environ["PATH"], "HOME": str(folder), "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
    command = [sys.executable, "-W", "ignore", "-c", source, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=there, check=False)
    print(ran.stdout, ran.stderr[-2000:])
    assert ran.returncode == 0
    return [line.split() for line in ran.stdout.splitlines()]


def test_every_form_computes_geglu(tmp_path: Path) -> None:
    """Interpreted: the kernels as they are written. (In bfloat16 they cannot be: the interpreter multiplies its
    bits.)"""
    found = run(INTERPRETED, folder=tmp_path, TRITON_INTERPRET="1")
    assert len(found) == 4 * 2 * 4
    assert all(float(error) < LIMITS[dtype, way] for *_, dtype, way, error in found)


COMPILED = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from qwenimg.backends.torch.ops import gated_product as gated

dtype, *capabilities = sys.argv[1:]
whole = ("M", "C", "K", "x_row", "weight_row")
for tile in gated.TILES:
    constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner, "GROUP": gated.GROUP}
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | dict.fromkeys(whole, "i32")
    types |= dict.fromkeys(constants, "constexpr")
    sixteens = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in (*whole[1:], "x", "weight")}
    source = ASTSource(gated._product, types, constants, sixteens)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    for capability in capabilities:
        made = compile(source, target=GPUTarget("cuda", int(capability), 32), options=options)
        kinds = [name for name in ("wgmma", "mma.sync") if name in made.asm["ptx"]]
        print(capability, made.metadata.shared, *kinds)
"""
CARDS = {"80": (163, "mma.sync"), "90": (227, "wgmma")}  # A100 and H100: kB of shared memory that a block may have


def test_it_compiles_for_cards(tmp_path: Path) -> None:
    """Each tile within the shared memory of the card, by its instructions for products."""
    printed = run(COMPILED, "bf16", *CARDS, folder=tmp_path)
    assert len(printed) == 3 * len(CARDS)
    for capability, size, *kinds in printed:
        shared, instruction = CARDS[capability]
        assert int(size) <= shared * 1024 and kinds == [instruction]


# Which is taken


def given(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 16), torch.ones(16, 16), torch.ones(16)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A card that says which way is asked for."""
    gated = importlib.import_module("qwenimg.backends.torch.ops.gated_product")
    monkeypatch.setattr(gated, "by", lambda way, x, weight, bias: x[:, :8] * (10 + gated.WAYS.index(way)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gated._known.cache_clear()
    yield gated
    gated._known.cache_clear()


def test_the_fastest_is_taken_and_kept(on_a_card: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gated, asked = on_a_card, list[Any]()
    times = {way: float(i) for i, way in enumerate((gated.TILES[1], None, gated.TILES[0], gated.TILES[2]))}

    def seconds(way: Any, *operands: torch.Tensor) -> float:
        asked.append((way, operands[0].shape[0]))
        return times[way]

    monkeypatch.setattr(gated, "_seconds", seconds)
    x, *weights = given(33)
    made = gated.linear_geglu(x.view(3, 11, 16), *weights)
    assert made.shape == (3, 11, 8) and bool((made == 12).all()), "by the second tile"
    assert [way for way, _ in asked] == list(gated.WAYS)
    gated.linear_geglu(*given(64))
    assert len(asked) == 4, "so many rows are as good as 33"
    gated.linear_geglu(*given(65))
    assert len(asked) == 8
    gated._known.cache_clear()
    gated.linear_geglu(x, *weights)
    kept = json.loads((tmp_path / "compiled" / gated.FILE).read_text())
    print(kept)
    assert len(asked) == 8 and list(kept.values()) == [str(gated.TILES[1])] * 2, "a later run finds it in the file"


@pytest.mark.parametrize("text", ["", "[]", '{"a card": 3}', '{"a card": "Tile(1)"}', '{"a": [', "null"])
def test_a_file_of_anything_else_is_none(on_a_card: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / on_a_card.FILE).write_text(text)
    assert on_a_card._known() == {}


def test_nothing_is_timed_within_a_recording(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(on_a_card, "_seconds", lambda *_: pytest.fail("timed"))
    assert on_a_card._fastest(*given(3)) is None and on_a_card._known() == {}


def test_what_a_card_cannot_hold_takes_for_ever(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def too_large(*_: Any) -> None:
        raise OutOfResources(200_000, 100_000, "shared memory")

    monkeypatch.setattr(on_a_card, "by", too_large)
    assert on_a_card._seconds(on_a_card.TILES[2], *given(3)) == float("inf")


def test_a_folder_that_cannot_be_written_costs_a_timing(on_a_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(on_a_card, "_seconds", lambda way, *_: 1.0 if way is None else 2.0)
    assert on_a_card._fastest(*given(3)) is None and len(on_a_card._known()) == 1
