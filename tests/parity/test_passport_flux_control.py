"""Passports of runs of Flux.1 with a Union, with two pictures, and with a ControlNet of fewer blocks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import mutants_flux_control as faults
from support.mutant import Patch, side
from support.passport_mutants import cut
from support.tiny_flux_control import write_controlnet

import qwenimg
from qwenimg.common.parity import check, record, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
RNG = np.random.default_rng(2)
PICTURES = [RNG.integers(0, 256, (48, 64, 3), np.uint8) for _ in range(2)]
ASKED: dict[str, Any] = {
    "prompt": "a ring", "width": 64, "height": 48, "steps": 3, "seed": 3, "guidance": 4.0, "true_cfg": 2.0,
    "negative_prompt": "blue",
}  # fmt: skip


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("nets")
    return str(write_controlnet(place / "union", "union")), str(write_controlnet(place / "pro-2", "pro-2"))


@pytest.fixture(scope="module")
def passport(
    tiny_flux: dict[str, Path], networks: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Passport:
    """Recorded on torch, written and read."""
    union, plain = networks
    control = [
        Control(union, "a", "depth", scale=0.7, start=0.3, picture=PICTURES[0]),
        Control(plain, "b", scale=1.2, picture=PICTURES[1]),
    ]
    with closing(qwenimg.load(tiny_flux["dev"], "cpu", "fp32")) as pipe:
        asked = ASKED | {"control": control}
        made = record.record(pipe, asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
    path = tmp_path_factory.mktemp("passport") / "a.safetensors"
    passport_file.write(path, made, overwrite=False)
    return passport_file.read(path)


def judged(folder: Path, backend: str, passport: Passport, networks: tuple[str, ...]) -> tuple[Any, Any]:
    with closing(qwenimg.load(folder, backend, "fp32")) as pipe:
        check.check_run(passport, pipe, (), networks)
        blocks = list(check.blocks(passport, pipe, (), networks))
        return blocks, check.picture(passport, pipe, (), networks)


@pytest.mark.sample(0)
def test_it_holds_on_mlx(passport: Passport, tiny_flux: dict[str, Path], networks: tuple[str, str]) -> None:
    blocks, drawn = judged(tiny_flux["dev"], "mlx", passport, networks)
    print(*summary.lines(blocks, drawn), sep="\n")
    assert summary.verdict(blocks, drawn) == ""
    kinds = {block.block for block in passport.blocks if block.component == "controlnet 1"}
    assert kinds >= {"block", "single_block", "modulation", "time", "start", "residual"}
    steps = {one.name: one.output_error for one in drawn.stations if one.name.startswith("control ")}
    assert list(steps) == ["control 1", "control 2", "control 3"]
    assert all(error is not None and 0 < error < 1e-5 for error in steps.values())


FAULTS = {
    faults.one_block_late: "control 1: differs",
    faults.blocks_in_turn: "control 2: differs",
    faults.none_of_one_stream: "control 2: differs",
    faults.scale_squared: "control 1: differs",
    faults.window_ignored: "control 1: differs",
    faults.last_control_alone: "control 2: differs",
    faults.kind_of_another_picture: "control 2: differs",
    faults.kind_not_read: "control 2: differs",
    faults.guidance_1_off: "control 1: differs",
    faults.pooled_text_not_its_own: "control 1: differs",
    faults.at_the_time_of_the_first_step: "control 2: differs",
    faults.rows_and_columns_swapped: "control 1: differs",
    faults.picture_not_added: "control 1: differs",
    faults.picture_turned: "vae.encode 1: differs",
    faults.mean_of_the_picture: "the initial noise is another one",  # which is drawn after the sample
    faults.residuals_without_their_layers: "controlnet 2.controlnet_blocks.0: error",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(0, rest=8)
def test_a_fault_is_named_where_it_is_made(
    passport: Passport,
    tiny_flux: dict[str, Path],
    networks: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
    backend: str,
) -> None:
    blocks = tuple(block.name for block in passport.blocks if block.block == "residual")
    fault(Patch(monkeypatch, side(backend)))
    found, drawn = judged(tiny_flux["dev"], backend, cut(passport, blocks), networks)
    failures = [f"{one.name}: {why}" for one in found for why in one.failures] + list(drawn.failures)
    print(*failures[:3], sep="\n")
    assert failures[0].startswith(FAULTS[fault])
