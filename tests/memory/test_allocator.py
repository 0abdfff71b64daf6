"""The plan of a picture, stage by stage, against what an allocator counts: that of the pretend accelerator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from measure_memory import ALLOCATOR, COUNTED, NEAR_COUNTED, STARTS, Run, compared, far, made
from random_model import DIT, TEXT, write_random_model
from support.allocated import counted


@pytest.mark.parametrize("limit", ["20MB", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.sample(0)
def test_a_small_transformer(tmp_path: Path, limit: str | None) -> None:
    """Streamed with 40 % of its size, and whole: at the peak, since its stages are small ones."""
    dit = replace(DIT, num_layers=8, num_attention_heads=8, joint_attention_dim=TEXT.hidden_size)
    write_random_model(tmp_path / "model", dit=dit, dtype="bfloat16")
    load = {"model": tmp_path / "model", "precision": "fp32", "max_memory": limit}
    plan, found = counted(load, {"prompt": "a red circle", "width": 128, "height": 128, "steps": 1}, STARTS)
    peak = max(found["stages"].values())
    print(f"limit {limit}: planned {plan['peak_bytes'] / 1e6:.1f} MB, counted {peak / 1e6:.1f}")
    assert abs(plan["peak_bytes"] / peak - 1) <= NEAR_COUNTED


@pytest.mark.slow
@pytest.mark.parametrize("run", COUNTED, ids=lambda run: run.name)
def test_wide_models(tmp_path: Path, run: Run) -> None:
    found = compared(made(tmp_path, run.model), run)
    assert abs(found["predicted"] / found["measured"] - 1) <= NEAR_COUNTED and far(found, counted=True) == {}


@pytest.mark.parametrize("run", COUNTED, ids=lambda run: run.name)
def test_every_stage_that_was_counted_is_near_its_plan(run: Run) -> None:
    found = json.loads(ALLOCATOR.read_text())[run.name]
    assert abs(found["predicted"] / found["measured"] - 1) <= NEAR_COUNTED and far(found, counted=True) == {}
