"""Passports of runs of Flux.1 whose texts have pictures, by Redux."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import mutants_redux as faults
from support import passport_runs
from support.cli_runner import cli
from support.mutant import Patch, side
from support.passport_mutants import cut
from support.passport_runs import RecordedRun
from support.tiny_redux import write_redux

from qwenimg.common.parity import summary
from qwenimg.common.request.control_text import Control

BACKENDS = ("cpu", "mlx")
PICTURES = list(np.random.default_rng(2).integers(0, 256, (2, 48, 64, 3), np.uint8))
ASKED: dict[str, Any] = {"width": 64, "height": 48, "steps": 2, "seed": 3, "guidance": 4.0}
STATIONS = ("image encoder 1 1", "redux 1 1")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_redux(tmp_path_factory.mktemp("redux") / "FLUX.1-Redux-dev")


@pytest.fixture(scope="module")
def recorded(tiny_flux: dict[str, Path], net: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    """Two pictures with scales of their own, a prompt and a negative prompt; and one picture alone."""
    place = tmp_path_factory.mktemp("passports")
    two = [
        Control(str(net), "a", scale=0.7, picture=PICTURES[0]),
        Control(str(net), "b", parts=(("tokens", 0.4), ("pooled", 0.5)), picture=PICTURES[1]),
    ]
    texts = {"prompt": "a ring", "negative_prompt": "blue", "true_cfg": 2.0}
    one = [Control(str(net), "a", picture=PICTURES[0])]
    return {
        "two": RecordedRun(tiny_flux["dev"], place / "two.safetensors", ASKED | texts | {"control": two}),
        "one": RecordedRun(tiny_flux["dev"], place / "one.safetensors", ASKED | {"prompt": "", "control": one}),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["two", "one"])
@pytest.mark.sample(0)
def test_it_holds(recorded: dict[str, RecordedRun], kind: str, backend: str) -> None:
    run = recorded[kind]
    judged, drawn = run.judged(backend, run.passport)
    print(*summary.lines(judged, drawn), sep="\n")
    assert summary.verdict(judged, drawn) == ""
    assert run.passport.picture is not None
    kinds = {(block.component, block.block) for block in run.passport.blocks}
    assert kinds >= {("image encoder 1", "layer"), ("image encoder 1", "end"), ("redux 1", "layer")}
    assert any(component == "text_encoder_2" for component, _ in kinds) == (kind == "two")
    assert any(block.name.startswith("vae.encoder.") for block in run.passport.blocks), "which saw no picture here"
    stations = {station.name: station for station in drawn.stations}
    texts = [name for name in stations if name.startswith("transformer text")]
    assert texts == [f"transformer text {i}" for i in range(1, 3 if kind == "two" else 2)]
    assert all(stations[name].input_error < 1e-6 for name in texts)
    errors = [stations[name].output_error for name in STATIONS]
    print(errors)
    assert all(error is not None and (0 < error < 2e-5 or backend == "cpu") for error in errors)
    if kind == "two":
        assert [one.parts for one in run.passport.picture.controls] == [{}, {"tokens": 0.4, "pooled": 0.5}]


FAULTS = {
    faults.encoder_without_its_last_layer: "image encoder 1 1: differs",
    faults.states_not_normed: "image encoder 1 1: differs",
    faults.positions_one_late: "image encoder 1.embeddings: error",
    faults.no_bias_below: "redux 1 1: differs",
    faults.no_activation: "redux 1 1: differs",
    faults.bias_of_every_layer_left_out: "redux 1.redux_up: error",
    faults.picture_cut: "image encoder 1 1: what enters it differs",
    faults.rows_and_columns_of_patches_swapped: "image encoder 1 1: what enters it differs",
    faults.scale_squared: "transformer text 1: what enters it differs",
    faults.first_picture_alone: "transformer text 1: what enters it differs",
    faults.tokens_before_the_text: "transformer text 1: what enters it differs",
    faults.negative_prompt_sees_it: "transformer text 2: what enters it differs",
    faults.pooled_text_once: "step 1: differs",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.sample(0)
def test_a_fault_is_named_where_it_is_made(
    recorded: dict[str, RecordedRun], monkeypatch: pytest.MonkeyPatch, fault: Any, backend: str
) -> None:
    run = recorded["two"]
    components = ("redux 1", "image encoder 1")
    blocks = tuple(block.name for block in run.passport.blocks if block.component in components)
    fault(Patch(monkeypatch, side(backend)))
    judged, drawn = run.judged(backend, cut(run.passport, blocks))
    failures = [f"{row.name}: {why}" for row in judged for why in row.failures] + list(drawn.failures)
    print(*failures[:3], sep="\n")
    assert failures[0].startswith(FAULTS[fault])


# By the command line


@pytest.mark.sample(0)
def test_what_is_given_again(tiny_flux: dict[str, Path], net: Path, tmp_path: Path) -> None:
    """In float32 without a prompt; another Redux, and none; then in bfloat16 with a prompt on both backends."""
    model, path, other = tiny_flux["dev"], tmp_path / "p.safetensors", write_redux(tmp_path / "other", 53)
    for name, picture in zip(("a.png", "b.png"), PICTURES, strict=True):
        Image.fromarray(picture).save(tmp_path / name)
    size = ("--steps", "2", "--size", "64x48")
    first, second = (("--ip-image", str(tmp_path / name)) for name in ("a.png", "b.png"))
    passport_runs.record(model, path, "cpu", *size, "--prompt", "", "--ip-adapter", f"{net}:0.6", *first, *second)
    passport_runs.check(model, path, "cpu", "--ip-adapter", str(net))

    def checked(*given: str) -> Any:
        return cli("parity", "check", str(path), str(model), "--backend", "cpu", "--blocks", *given)

    assert checked("--control", str(net)).code == 0
    checked().refused(2, "recorded with --control")
    checked("--ip-adapter", str(other)).refused(5, "another network than was recorded")
    words = ("--backends", "cpu,mlx", "--prompt", "a ring", "--ip-adapter", str(net), *first)
    ran = cli("parity", "run", str(model), *size, *words, "--precision", "bf16")
    print(ran.out.decode())
    assert ran.code == 0, ran.err
