"""The stations of a recorded picture: how they are held, what a check says it did not look at, hostile files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import cli
from support.mutants_qwen import prepare
from support.refusals import refused, safetensors_bytes, tensor

import qwenimg
from qwenimg.common.base.errors import DoesNotFit
from qwenimg.common.parity import check, record, rerun, stations, summary
from qwenimg.common.parity.passport import passport_file
from qwenimg.common.parity.passport.passport import Passport
from qwenimg.common.parity.stations import FARTHEST, FLOOR, INPUT_LIMIT, MARGIN, Station, judged
from qwenimg.common.parity.tape import Tape, taped

ASKED: dict[str, Any] = {
    "prompt": "a large blue star",
    "width": 32,
    "height": 32,
    "steps": 2,
    "guidance": 3.0,
    "seed": 0,
}
X = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)


def recorded(backend: str = "cpu", precision: str = "bf16", **asked: Any) -> Passport:
    pipe = qwenimg.load("shapes", backend, precision)
    try:
        return record.record(pipe, ASKED | asked, exact=pipe.engine, sampled=True, notify=lambda text: None)
    finally:
        pipe.close()


@pytest.fixture(scope="module")
def passport() -> Passport:
    return recorded()


@pytest.mark.sample(0)
def test_a_picture_without_a_seed_has_one_for_all_its_runs() -> None:
    """The float32 reference of another noise would be as far off as a wrong picture, and hide one."""
    made = recorded(seed=None)
    assert made.picture is not None and isinstance(made.picture.asked["seed"], int)
    own = [station.policy_error for station in made.run if station.outputs]
    print(made.picture.asked["seed"], own)
    assert own and all(one is not None and one < 0.05 for one in own)


# The comparator


Y = np.array([[0.5, -1, 2], [3, 1, 1]], np.float32)
STEP = Station(name="step 1", inputs=(X, np.asarray(0.5)), outputs=(Y,), policy_error=0.01)
TEXT = Station(name="text_encoder 1", inputs=(np.array([1, 2, 3]),), outputs=(X,), policy_error=0.0)
WRONG = {
    "another token": replace(TEXT, inputs=(np.array([1, 2, 4]),)),
    "one token less": replace(TEXT, inputs=(np.array([1, 2]),)),
    "what enters": replace(STEP, inputs=(X * np.float32(1 + 3 * INPUT_LIMIT), np.asarray(0.5))),
    "another noise level": replace(STEP, inputs=(X, np.asarray(0.50002))),
    "five times its own distance": replace(STEP, outputs=(Y + np.float32(0.05) * (Y - X),)),
    "float32 far from float32": replace(TEXT, outputs=(X * np.float32(1 + 2 * FLOOR),)),
    "not a number": replace(STEP, outputs=(Y * np.float32("nan"),)),
    "not a number where it enters": replace(STEP, inputs=(X * np.float32("nan"), np.asarray(0.5))),
    "infinite": replace(STEP, outputs=(Y * np.float32("inf"),)),
    "zeros": replace(STEP, outputs=(0 * Y,)),
    "no step at all": replace(STEP, outputs=(X,)),
    "twice": replace(STEP, outputs=(2 * Y,)),
    "the other sign": replace(STEP, outputs=(-Y,)),
    "another shape": replace(STEP, outputs=(Y.T,)),
    "one array less": replace(STEP, outputs=()),
    "a name that was not recorded": replace(STEP, name="step 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str) -> None:
    now = [WRONG[name] if one.name == WRONG[name].name else one for one in (TEXT, STEP)]
    now += [WRONG[name]] if WRONG[name].name == "step 2" else []
    found = judged([TEXT, STEP], now)
    print([one.failures for one in found])
    assert [one for one in found if one.failures]
    assert [one for one in judged([TEXT, STEP], [TEXT]) if one.failures], "a station that is missing"


def test_roundings_are_not() -> None:
    near = replace(
        STEP,
        inputs=(X * np.float32(1 + 0.5 * INPUT_LIMIT), np.asarray(0.5)),
        outputs=(Y + np.float32(0.025) * (Y - X),),
    )
    assert all(not one.failures for one in judged([TEXT, STEP], [TEXT, near]))
    lost = judged([replace(STEP, outputs=())], [STEP])
    assert lost[0].failures == ("step 1: what it makes was not recorded",)
    unknown = judged([replace(STEP, policy_error=None)], [replace(STEP, outputs=(2 * Y,))])
    assert [one.allowed for one in unknown] == [None] and not unknown[0].failures, "nothing is known of it"


def test_where_zeros_would_pass_nothing_is_judged() -> None:
    """The largest distance that is recorded still refuses a step that changes nothing."""
    widest = replace(STEP, policy_error=0.99 * FARTHEST)
    assert judged([widest], [replace(STEP, outputs=(X,))])[0].failures


# What is recorded


@pytest.mark.sample(0)
def test_the_distance_from_float32_is_that_of_a_run_in_float32(passport: Passport) -> None:
    """Measured here by a pipeline in float32 that was opened by itself, on the other backend."""
    tape, pipe = Tape(passport.run), qwenimg.load("shapes", "mlx", "fp32")
    with taped(pipe, tape):
        pipe(**ASKED)
    pipe.close()
    exact = {station.name: station for station in tape.stations}
    for station in passport.run:
        if station.outputs:
            now = stations.output_error(exact[station.name], station)
            print(f"{station.name}: {station.policy_error:.2e}, by MLX {now:.2e}")
            assert station.policy_error is not None and abs(now - station.policy_error) < 1e-5 + 0.01 * now
    names = [station.name for station in passport.run]
    assert names == [
        "text_encoder 1", "text_encoder 2", "transformer.time_text_embed", "step 1", "step 2", "vae.decode",
    ]  # fmt: skip


@pytest.mark.sample(0)
def test_both_branches_in_one_batch_pass_the_same_stations(passport: Passport) -> None:
    """As a GPU takes them."""
    pipe = qwenimg.load("shapes", "cpu", "bf16")
    prepare(pipe)
    drawn = check.picture(passport, pipe)
    pipe.close()
    assert drawn.failures == () and drawn.pixels == 0


@pytest.mark.sample(0)
def test_float32_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a check says that it judged none of what networks made."""

    def refuse(*asked: Any) -> None:
        raise DoesNotFit("too large")

    monkeypatch.setattr(rerun, "taped", refuse)
    found = recorded(steps=1)
    monkeypatch.undo()
    pipe = qwenimg.load("shapes", "cpu", "bf16")
    drawn = check.picture(found, pipe)
    pipe.close()
    said = summary.not_looked_at(found, drawn)
    assert drawn.failures == () and len(said) == 4 and all("float32 was not recorded" in line for line in said)


# What a check says


def written(folder: Path, passport: Passport) -> str:
    path = folder / "a.safetensors"
    passport_file.write(path, passport, overwrite=True)
    return str(path)


@pytest.mark.sample(0)
def test_a_check_says_what_it_did_not_look_at(passport: Passport, tmp_path: Path) -> None:
    path = written(tmp_path, passport)
    whole = cli("parity", "check", path, "--backend", "cpu", "--json")
    assert whole.code == 0 and whole.events[0]["not_looked_at"] == []
    assert [one["ok"] for one in whole.events[0]["picture"]["stations"]] == [True] * 6
    blocks = cli("parity", "check", path, "--backend", "cpu", "--blocks", "--json")
    assert blocks.code == 0 and "what enters the VAE" in blocks.events[0]["not_looked_at"][0]
    assert b"not looked at: the picture: token ids" in cli("parity", "check", path, "--backend", "cpu", "--blocks").out
    first = written(tmp_path, replace(passport, run=()))  # as the first versions wrote it
    ran = cli("parity", "check", first, "--backend", "cpu", "--json")
    assert ran.code == 0 and "latents and pixels are told only" in ran.events[0]["not_looked_at"][0]


@pytest.mark.sample(0)
def test_a_network_of_other_heads_does_not_blame_the_passport(
    passport: Passport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are the recorded ones, so what computes them is wrong."""
    from qwenimg.backends.torch import ops

    original = ops.RMSNorm.forward

    def other_heads(layer: Any, x: Any) -> Any:
        y = original(layer, x)
        return y.flatten(-2).unflatten(-1, (2, -1)) if layer.path.endswith("norm_q") else y

    monkeypatch.setattr(ops.RMSNorm, "forward", other_heads)
    ran = cli("parity", "check", written(tmp_path, passport), "--backend", "cpu", "--blocks")
    print(ran.err)
    assert ran.code == 6 and "transformer_blocks.0" in ran.err and "record it again" not in ran.err


# Hostile files


STATION = {"name": "step 1", "given": ["t0"], "made": ["t0"], "own": 0.1}
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no list": lambda d: d.update(run={}),
    "a number": lambda d: d.update(run=3),
    "null": lambda d: d.update(run=None),
    "a station that is a text": lambda d: d.update(run=["step 1"]),
    "a field more": lambda d: d.update(run=[STATION | {"x": 1}]),
    "a field less": lambda d: d.update(run=[{"name": "a", "given": [], "made": []}]),
    "a name that is a number": lambda d: d.update(run=[STATION | {"name": 1}]),
    "no name": lambda d: d.update(run=[STATION | {"name": ""}]),
    "a long name": lambda d: d.update(run=[STATION | {"name": "x" * 201}]),
    "two of one name": lambda d: d.update(run=[STATION, STATION]),
    "tensors that are a text": lambda d: d.update(run=[STATION | {"made": "t0"}]),
    "a tensor that is a number": lambda d: d.update(run=[STATION | {"made": [0]}]),
    "a tensor that is a list": lambda d: d.update(run=[STATION | {"made": [["t0"]]}]),
    "a tensor that is not there": lambda d: d.update(run=[STATION | {"given": ["t7"]}]),
    "too many tensors": lambda d: d.update(run=[STATION | {"given": ["t0"] * 9}]),
    "a tensor of NaN": lambda d: d.update(run=[STATION | {"given": ["t1"]}]),
    "its own distance a text": lambda d: d.update(run=[STATION | {"own": "0"}]),
    "its own distance true": lambda d: d.update(run=[STATION | {"own": True}]),
    "its own distance negative": lambda d: d.update(run=[STATION | {"own": -1e-9}]),
    "its own distance huge": lambda d: d.update(run=[STATION | {"own": 1e300}]),
    "its own distance above all": lambda d: d.update(run=[STATION | {"own": 1.01 / MARGIN}]),
    "float32 that is far from float32": lambda d: d.update(run=[STATION], precision="fp32"),
    "too many": lambda d: d.update(run=[STATION | {"name": f"step {i}"} for i in range(10_001)]),
}


def hostile(change: Callable[[dict[str, Any]], object], folder: Path) -> Path:
    document: dict[str, Any] = {
        "version": "0", "created": "", "precision": "bf16", "places": {}, "picture": None,
        "model": {"name": "shapes", "family": "qwen-image", "quantize": "", "fingerprints": {}, "shapes": {}},
        "blocks": [
            {"component": "vae", "block": "conv", "path": "a", "name": "a", "arguments": [], "operations": {},
             "results": [{"dtype": "float32", "shape": [1], "seed": None, "gain": 1.0, "lacks": None, "values": "t0"}]},
        ],
        "sides": [{"backend": "cpu", "device": "CPU", "versions": {}, "tf32": False, "figures": []}],
    }  # fmt: skip
    change(document)
    text, body = json.dumps(document), np.array([1.0, np.nan], "<f4").tobytes()
    table = {"t0": tensor([1], 0, 4), "t1": tensor([1], 4, 8)}
    sum_ = passport_file._sum(text, table, body)
    metadata = {"format": "qwenimg-parity", "schema": "1", "passport": text, "sha256": sum_}
    path = folder / "hostile.safetensors"
    path.write_bytes(safetensors_bytes({"__metadata__": metadata, **table}, body))
    return path


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile(tmp_path: Path, change: str) -> None:
    assert "no passport as expected" in refused(passport_file.read, hostile(HOSTILE[change], tmp_path))


def test_the_hostile_ones_are_right_but_for_that(tmp_path: Path) -> None:
    found = passport_file.read(hostile(lambda d: d.update(run=[STATION]), tmp_path))
    assert [one.name for one in found.run] == ["step 1"] and found.run[0].allowed == pytest.approx(0.1 * MARGIN)


@pytest.mark.sample(0)
def test_stations_are_written_as_they_were(passport: Passport, tmp_path: Path) -> None:
    """States of 16 bit take 16 bit, and lose nothing."""
    read = passport_file.read(Path(written(tmp_path, passport)))
    for then, now in zip(passport.run, read.run, strict=True):
        assert then.name == now.name and then.policy_error == now.policy_error
        for a, b in zip((*then.inputs, *then.outputs), (*now.inputs, *now.outputs), strict=True):
            assert a.shape == b.shape and np.array_equal(a, b)
    assert passport_file.encoded(read) == Path(written(tmp_path, passport)).read_bytes()
