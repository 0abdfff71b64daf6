"""Whole runs whose blocks are streamed, with 30 % of the denoiser, and of weights in codes: resident memory against the
plan, at the peak and stage by stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure_memory import NEAR, RESULTS, RUNS, Run, compared, far, is_over, made

from qwenimg.common.base.amounts import parse_bytes

STREAMED = [run for run in RUNS if "--max-memory" in run.options]
CODED = [run for run in RUNS if "-q" in run.options.split()]
# Where the plan does not hold yet: decoding in bands of 64 rows on MLX is planned 1.12 times what it takes.
FAR = ("sd15-mlx-128x128-precision-fp32-max-memory-258MB",)
MEASURED = [
    pytest.param(run, marks=pytest.mark.xfail(strict=True, reason="not mended yet")) if run.name in FAR else run
    for run in RUNS
    if run.name in json.loads(RESULTS.read_text())
]
OVER = 1.10

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of resident memory")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("run", STREAMED, ids=lambda run: run.name)
def test_a_streamed_run_stays_within_its_plan(tmp_path: Path, run: Run) -> None:
    found = compared(made(tmp_path, run.model), run)
    assert found["measured"] <= OVER * found["predicted"]
    assert abs(found["predicted"] / found["measured"] - 1) <= NEAR and far(found) == {}
    assert found["measured"] <= parse_bytes(run.options.split()[-1], "--max-memory")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("run", CODED, ids=lambda run: run.name)
def test_every_stage_of_weights_in_codes_is_near_its_plan(tmp_path: Path, run: Run) -> None:
    """What they are decoded to was not counted: a modulation took 1.4 times its plan."""
    assert far(compared(made(tmp_path, run.model), run)) == {}


@pytest.mark.parametrize("run", MEASURED, ids=lambda run: run.name)
def test_every_stage_that_was_measured_is_near_its_plan(run: Run) -> None:
    measured = json.loads(RESULTS.read_text())[run.name]
    assert far(measured) == {} and not is_over(run, measured)
