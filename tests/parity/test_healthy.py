"""Machines with other kernels: none is taken for a wrong one, and how much of what is allowed each uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import mutants_qwen
from support.healthy import HEALTHY
from support.mutant import PRECISIONS, Judge, Mutant

QUICK = ("sums_in_another_order", "attention_not_fused", "bias_after_a_rounding")  # of Qwen-Image in bfloat16


@pytest.fixture(scope="module")
def judges(folders: dict[str, Path]) -> dict[str, Judge]:
    return {"qwen": Judge("shapes", mutants_qwen.prepare), "sd": Judge(folders["sdxl"])}


def pairs() -> list[Any]:
    """Of each family on each backend every machine in every precision, against one passport of torch."""
    return [
        pytest.param(
            family,
            machine.under(precision),
            id=f"{family}-{machine.name}-{precision}",
            marks=[] if (family, precision) == ("qwen", "bf16") and machine.name in QUICK else [pytest.mark.slow],
        )
        for family in ("qwen", "sd")
        for machine in HEALTHY
        for precision in PRECISIONS
    ]


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(("family", "machine"), pairs())
@pytest.mark.sample(0)
def test_a_machine_with_other_kernels_passes(
    judges: dict[str, Judge], family: str, machine: Mutant, backend: str
) -> None:
    shares = judges[family].shares(backend, machine)
    print(f"{family} in {machine.precision}, {machine.what} on {backend}: blocks {shares[0]:.2f}, {shares[1]:.2f}")
    assert max(shares) < 1


@pytest.mark.sample(0)
def test_other_kernels_are_others(judges: dict[str, Judge]) -> None:
    """Each but the usual ones gives other bits somewhere, or it would show nothing."""
    usual = judges["qwen"].shares("cpu", HEALTHY[0].under("bf16"))
    others = [machine for machine in HEALTHY[1:] if machine.name in QUICK]
    assert all(judges["qwen"].shares("cpu", machine.under("bf16")) != usual for machine in others)


def test_there_are_enough() -> None:
    assert 2 * 2 * len(HEALTHY) * len(PRECISIONS) >= 20
