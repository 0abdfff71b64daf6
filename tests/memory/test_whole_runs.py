"""Whole runs whose blocks are streamed, with 30 % of the denoiser, and of weights in codes: resident memory against the
plan, at the peak and stage by stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from measure_memory import NEAR, RESULTS, RUNS, Run, compared, far, is_over, made

from qwenimg.common.base.amounts import parse_bytes

STREAMED = [run for run in RUNS if "--max-memory" in run.options]
CODED = [run for run in RUNS if "-q" in run.options.split()]
# Where more is planned than MLX takes: decoding in bands of 64 rows 1.12 to 1.15 times, with guidance's branches in
# turn a step 1.25 times, and the encoding of a reference of 384 pixels 1.19 times.
FAR = (
    "sd15-mlx-128x128-precision-fp32-max-memory-270MB",
    "sdxl-mlx-128x128-precision-fp32-max-memory-770MB",
    "sd15-mlx-192x192-precision-fp32-max-memory-240MB",
    "flux2-kv-mlx-128x128-precision-fp32-i-large.png",
)


def marked(runs: list[Run]) -> list[Any]:
    """Return `runs`, those that are far from their plan marked as such."""
    far_off = pytest.mark.xfail(strict=True, reason="more is planned than it takes")
    return [pytest.param(run, marks=far_off) if run.name in FAR else run for run in runs]


MEASURED = [run for run in RUNS if run.name in json.loads(RESULTS.read_text())]
OVER = 1.10

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak of resident memory")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("run", STREAMED, ids=lambda run: run.name)
def test_a_streamed_run_stays_within_its_plan(tmp_path: Path, run: Run) -> None:
    """Those of FAR take less than is planned, by about what is allowed: sometimes more, sometimes less than that."""
    found = compared(made(tmp_path, run.model), run)
    assert found["measured"] <= OVER * found["predicted"]
    assert run.name in FAR or (abs(found["predicted"] / found["measured"] - 1) <= NEAR and far(found) == {})
    assert found["measured"] <= parse_bytes(run.options.split()[-1], "--max-memory")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("run", CODED, ids=lambda run: run.name)
def test_every_stage_of_weights_in_codes_is_near_its_plan(tmp_path: Path, run: Run) -> None:
    """What they are decoded to was not counted: a modulation took 1.4 times its plan."""
    assert far(compared(made(tmp_path, run.model), run)) == {}


@pytest.mark.parametrize("run", marked(MEASURED), ids=lambda run: run.name)
def test_every_stage_that_was_measured_is_near_its_plan(run: Run) -> None:
    measured = json.loads(RESULTS.read_text())[run.name]
    assert far(measured) == {} and not is_over(run, measured)
