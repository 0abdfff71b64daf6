"""A run under control networks, as a plan simulates it and as it is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwenimg import Pipeline
from qwenimg.common.pipeline import fit_options
from qwenimg.common.runtime.residents import Occupancy, Placement, Residents
from qwenimg.common.runtime.stages import Stage
from qwenimg.common.weights import streaming


def with_nets(pipe: Pipeline, asked: dict[str, Any]) -> Any:
    """The plan of an image by the model with its networks."""
    request = pipe.check("a circle", **asked)
    pipe.controls.give(pipe.model, request)
    return fit_options.plan_memory(pipe.model, request)


def planned(pipe: Pipeline, asked: dict[str, Any]) -> list[tuple[str, str, bool, int]]:
    """The stages of the networks and of the transformer as a plan simulates them: each with its component, whether that
    is opened, and its bytes in memory."""
    rows: list[tuple[str, str, bool, int]] = []
    place = Occupancy.place

    def noted(memory: Occupancy, stage: Stage) -> Placement:
        way = place(memory, stage)
        if stage.component.role == "transformer":
            held = streaming.peak_weight_bytes(pipe.runtime.load_plan(way.component), None)
            rows.append((stage.name, stage.resident, way.opens, held))
        return way

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Occupancy, "place", noted)
        plan = with_nets(pipe, asked)
    assert plan.fits(plan.budget)
    return rows


def drawn(pipe: Pipeline, asked: dict[str, Any]) -> tuple[list[tuple[str, str, bool, int]], np.ndarray]:
    """The same as a run enters them, and its latents."""
    rows: list[tuple[str, str, bool, int]] = []
    acquire = Residents.acquire

    def noted(residents: Residents, stage: Stage) -> Any:
        before = residents._memory.opened.get(stage.resident)
        result = acquire(residents, stage)
        now = residents._memory.opened.get(stage.resident)
        if stage.component.role == "transformer" and now is not None:
            held = streaming.peak_weight_bytes(pipe.runtime.load_plan(now), None)
            rows.append((stage.name, stage.resident, now is not before, held))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residents, "acquire", noted)
        latents = pipe("a circle", **asked).latents
    return rows, latents
