"""Passports of runs of Stable Diffusion with a ControlNet Union and with a T2I-Adapter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import mutants_sd_control as faults
from support.mutant import Patch, side
from support.passport_mutants import cut
from support.passport_runs import RecordedRun, of_tiny_sd
from support.tiny_adapter import write_adapter
from support.tiny_controlnet import write_union
from support.tiny_sd import _SMALL, UNETS

from qwenimg.common.parity import summary
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(2)
PICTURES = [RNG.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(2)]
ASKED: dict[str, Any] = {
    "prompt": "a ring", "width": 64, "height": 48, "steps": 3, "seed": 3, "guidance": 4.0, "negative_prompt": "blue",
    "control_mode": "control",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    """A Union with two pictures, one of them in a part of the steps, and an adapter."""
    place = tmp_path_factory.mktemp("passports")
    union = str(write_union(place / "union", UNETS["sdxl"] | _SMALL, num_control_type=6))
    adapter = str(write_adapter(place / "adapter", channels=UNETS["sd15"]["block_out_channels"]))
    kinds = [
        Control(union, "a", "depth", scale=0.7, picture=PICTURES[0]),
        Control(union, "b", "lineart", scale=1.2, end=0.7, picture=PICTURES[1]),
    ]
    one = Control(adapter, "a", scale=0.8, picture=PICTURES[0])
    return {
        "union": of_tiny_sd(place, "sdxl", "union", ASKED | {"control": kinds}),
        "adapter": of_tiny_sd(place, "sd15", "adapter", ASKED | {"control": [one]}),
    }


@pytest.mark.parametrize("kind", ["union", "adapter"])
@pytest.mark.sample(0)
def test_it_holds_on_mlx(recorded: dict[str, RecordedRun], kind: str) -> None:
    one = recorded[kind]
    judged, drawn = one.judged("mlx", one.passport)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    blocks = {block.block for block in one.passport.blocks if block.component == "controlnet 1"}
    assert blocks >= ({"body"} if kind == "adapter" else {"token", "kinds", "result", "start", "resnet", "tokens"})
    assert any(block.name.startswith("vae.encoder.") for block in one.passport.blocks), "which saw no picture here"
    errors = [station.output_error for station in drawn.stations if station.name.startswith("step ")]
    assert len(errors) >= 3 and all(error is not None and 0 < error < 2e-5 for error in errors)


FAULTS = {
    "union": {
        faults.one_block_late: "step 1: differs",
        faults.scale_twice: "step 1: differs",
        faults.joined_in_reverse: "step 1: differs",
        faults.without_a_prompt_controlled: "controlnet 1.add_embedding: what enters it has another shape",
        faults.kinds_swapped: "step 1: differs",
        faults.kinds_not_embedded: "step 1: differs",
        faults.token_not_used: "step 1: differs",
        faults.window_ignored: "step 3: differs",
        faults.keys_for_values: "controlnet 1.transformer_layes.0: error",
    },
    "adapter": {
        faults.features_one_block_late: "step 1: differs",
        faults.scale_twice: "step 1: differs",
        faults.features_in_reverse: "step 1: differs",
        faults.without_a_prompt_controlled: "step 1: differs",
        faults.features_behind_the_states: "step 1: differs",
        faults.relu_leaks: "controlnet 1.adapter.body.0: error",
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(kind, fault, id=f"{kind}-{fault.__name__}") for kind, row in FAULTS.items() for fault in row],
)
@pytest.mark.sample(0)
def test_a_fault_is_named_where_it_is_made(
    recorded: dict[str, RecordedRun], monkeypatch: pytest.MonkeyPatch, kind: str, fault: Any, backend: str
) -> None:
    one = recorded[kind]
    blocks = tuple(block.name for block in one.passport.blocks if block.block in ("token", "body"))
    fault(Patch(monkeypatch, side(backend)))
    judged, drawn = one.judged(backend, cut(one.passport, blocks))
    failures = [f"{row.name}: {why}" for row in judged for why in row.failures] + list(drawn.failures)
    print(*failures[:3], sep="\n")
    assert failures[0].startswith(FAULTS[kind][fault])
