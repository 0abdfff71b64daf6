"""Every kind of block on both backends against float64, each fed the same inputs: the backends are right and equal.

Prints a table of all errors in units of roundoff (`pytest -s`). The float64 reference is itself held against diffusers
in `test_float64_twin.py`.
"""

from __future__ import annotations

import platform
from types import SimpleNamespace

import numpy as np
import pytest
from measure_constants import GROWTH
from support.parity_bench import POLICIES, Bench, whole_runs
from support.parity_blocks import BLOCKS, FAMILIES, INPUT_FREE, Block
from support.parity_cases import MLX, twins
from support.parity_recorded import RECORDED, Operation, trace
from support.policies import BF16, BF16_PLAIN, FP32, MMDIT

from qwenimg.common.parity import parity
from qwenimg.common.precision.precision import Precision, bases

BASES = bases(MMDIT)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("parity"))


CASES = [
    pytest.param(block, policy, id=f"{block.name}-{policy.name}") for block in BLOCKS for policy in POLICIES[block.part]
]


@pytest.mark.parametrize(("block", "precision"), CASES)
@pytest.mark.sample(2)
def test_block(bench: Bench, block: Block, precision: Precision) -> None:
    failures = []
    for family in ("normal",) if block.name in INPUT_FREE else FAMILIES:
        for verdict in bench.judge(block, precision, family):
            print(verdict.row(f"{precision.name} {family}"))
            failures += [(family, failure) for failure in verdict.failures]
    assert not failures


def test_every_component_has_recorded_figures() -> None:
    assert {block.name for block in BLOCKS} == RECORDED.keys()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
@pytest.mark.sample(3)
def test_no_worse_than_recorded(bench: Bench, block: Block) -> None:
    """Far below the limits, an error that grows says that something was changed for the worse."""
    if platform.machine() != "x86_64" or MLX().engine.on_gpu:
        pytest.skip("the figures were recorded on x86-64 CPUs")
    for precision, recorded in zip(_recorded_with(block), RECORDED[block.name], strict=True):
        found = max(v.k(name) for v in bench.judge(block, precision) for name in v.figures)
        print(f"{block.name} {precision.name}: K {found:.2f}, recorded {recorded}")
        assert found <= GROWTH * recorded


def _recorded_with(block: Block) -> tuple[Precision, Precision]:
    if block.part == "vae":
        return FP32, POLICIES["vae"][1]
    return FP32, BF16 if block.case(BF16, "normal").dtype == "bfloat16" else BF16_PLAIN


# The same operations


@pytest.mark.parametrize("precision", BASES.values(), ids=BASES)
@pytest.mark.sample(1)
def test_both_backends_run_the_same_operations_in_the_same_dtypes(bench: Bench, precision: Precision) -> None:
    traces = {
        name: [trace(twin.engine, run) for run in whole_runs(bench, twin, precision).values()]
        for name, twin in twins().items()
    }
    for ours, theirs in zip(traces["torch"], traces["MLX"], strict=True):
        assert ours == theirs
    count = [len(trace) for trace in traces["torch"]]
    print(f"{precision.name}: {count} operations")
    assert min(count) > 20


def test_trace_names_operation_path_and_dtype(bench: Bench) -> None:
    for twin in twins().values():
        first, *_, last = trace(twin.engine, whole_runs(bench, twin, BF16)["text"])
        assert first == Operation(name="embedding", path="embed_tokens", dtype="bfloat16")
        assert last == Operation(name="rms_norm", path="norm", dtype="float32")
    assert parity.dtype_name(SimpleNamespace(dtype=np.dtype("float32"))) == "float32"
