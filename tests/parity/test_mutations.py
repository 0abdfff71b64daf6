"""Some of the faults that `make mutations` plants, on both backends: each is caught, and nothing where none is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant import Judge, Mutant
from mutants_qwen import MUTANTS, prepare
from mutants_sd import MUTANTS as SD_MUTANTS

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


def test_there_are_enough_in_every_family() -> None:
    for mutants in (MUTANTS, SD_MUTANTS):
        names = [(mutant.name, mutant.quantize) for mutant in mutants]
        assert len(names) == len(set(names)) >= 25


def test_the_table_has_every_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    assert [mutant.what for mutant in (*MUTANTS, *SD_MUTANTS) if f"| {mutant.what} |" not in page] == []
