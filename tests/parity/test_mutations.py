"""Some of the faults that `make mutations` plants, on both backends: each is caught, and nothing where none is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from lora_cases import write_lora
from mutant import Judge, Mutant, Patch, Probe, side
from mutants_qwen import MUTANTS, prepare
from mutants_sd import MUTANTS as SD_MUTANTS

import qwenimg
from qwenimg.common.hub.resolve import resolve
from qwenimg.common.numbers import packing

QUICK = ("layer_norm_eps", "no_residual", "norm_in_half", "packing_order")


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge("shapes", prepare)


PLANTED = [mutant for mutant in MUTANTS if mutant.name in QUICK]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_nothing_is_caught_where_none_is(judge: Judge, backend: str) -> None:
    passports = {(mutant.precision, mutant.quantize, mutant.picture): mutant for mutant in PLANTED}
    assert [judge.caught(backend, mutant, planted=False) for mutant in passports.values()] == [""] * len(passports)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("mutant", PLANTED, ids=lambda mutant: mutant.name)
def test_a_planted_fault_is_caught(judge: Judge, mutant: Mutant, backend: str) -> None:
    found = judge.caught(backend, mutant)
    print(f"{mutant.name} on {backend}: {found}")
    assert found


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("kind", ["qwen", "sdxl"])
def test_every_fault_can_still_be_planted(kind: str, backend: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Its place is there, and one of two pictures comes to it: in float32, or in codes with a LoRA. That it is caught
    is shown by `make mutations`, which does not run with each change."""
    mutants, folder = (MUTANTS, resolve("shapes").folder) if kind == "qwen" else (SD_MUTANTS, folders["sdxl"])
    lora = write_lora(folder, kind, tmp_path / "lora.safetensors")
    asked = {
        "width": 40,
        "height": 24,
        "steps": 1,
        "image": np.full((24, 40, 3), 90, np.uint8),
        "strength": 1.0,
        "seed": 0,
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        probe = Probe(monkeypatch, side(backend))
        for mutant in mutants:
            probe.plant(mutant)
        for precision, bits, adapter in (("fp32", None, ""), ("bf16", "8", str(lora))):
            pipe = qwenimg.load(folder, backend, precision, quantize=bits)
            if kind == "qwen":
                prepare(pipe)
            pipe("a red circle", lora=adapter, **asked)
            pipe.close()
    assert {mutant.name for mutant in mutants} - probe.reached == set()


def gone(patch: Patch) -> None:
    patch.set(packing, "packed", lambda x: x)


def passed_by(patch: Patch) -> None:
    patch.set(packing, "pack", lambda x: x)


def test_a_fault_whose_place_is_gone_or_passed_by_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(monkeypatch, side("cpu"))
    with pytest.raises(AttributeError, match="packed"):
        probe.plant(Mutant(gone, ""))
    with pytest.raises(AssertionError, match="changes nothing"):
        probe.plant(Mutant(lambda patch: None, ""))
    probe.plant(Mutant(passed_by, ""))
    assert probe.reached == set()
    packing.pack(np.zeros((1, 1, 2, 2)))
    assert probe.reached == {"passed_by"}


def test_there_are_enough_in_every_family() -> None:
    for mutants in (MUTANTS, SD_MUTANTS):
        names = [(mutant.name, mutant.quantize) for mutant in mutants]
        assert len(names) == len(set(names)) >= 25


def test_the_table_has_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    assert [mutant.what for mutant in (*MUTANTS, *SD_MUTANTS) if f"| {mutant.what} |" not in page] == []
