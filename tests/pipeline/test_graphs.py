"""Recorded calls of every family give the bits of the eager ones, with a stand-in for CUDA's graphs that runs the same
call again on the buffers that it was recorded with; what is not copied into those is caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cli_runner import cli
from family_cases import ASKED, KINDS, PROMPT, TASKS, opener, places
from lora_cases import write_lora
from pretend_device import Shell, pretend_engine, pretending
from toy_family import add_toy, write_toy

import qwenimg
from qwenimg import Pipeline, backends
from qwenimg.backends.torch import graphs
from qwenimg.common.base.errors import BackendMissing
from qwenimg.common.measure.published import published
from qwenimg.common.precision.residency import ALWAYS
from qwenimg.common.runtime import recording
from qwenimg.common.weights import streaming

Opened = Callable[..., Pipeline]


class Rerun:
    """What a graph does, on any device: the call that was captured, again on the memory that it was given."""

    made: ClassVar[list[Rerun]] = []

    def __init__(self) -> None:
        self.nbytes, self.replays = 0, 0
        Rerun.made.append(self)

    def capture(self, call: graphs.Call) -> tuple[torch.Tensor, torch.Tensor]:
        self.call, first = call, call()
        self.result = torch.full_like(first, float("nan"))
        return first, self.result

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self.call())


class Broken(Rerun):
    """As a capture that the driver refuses."""

    def capture(self, call: graphs.Call) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.fixture(autouse=True)
def fresh() -> None:
    Rerun.made = []


def recorded(pipe: Pipeline, graph: type[Rerun] = Rerun) -> Pipeline:
    pipe.engine.graph = graph  # type: ignore[attr-defined]
    assert pipe.record("on").on
    return pipe


@pytest.fixture(params=KINDS)
def load(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Path,
    folders: dict[str, Path],
    tmp_path: Path,
) -> Opened:
    add_toy(monkeypatch, tmp_path / "networks")
    kind, found = request.param, places(tiny_folder, folders, write_toy(tmp_path / "toy"))
    return opener(kind, found[kind], folders)


# Prompts of other lengths, sizes, one branch and the end of guidance, a sampler with two calls a step; the first again.
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    (PROMPT, {}),
    ("two blue squares beside a (green:1.2) triangle", {"seed": 8}),
    (PROMPT, {"width": 36, "height": 52}),
    (PROMPT, {"guidance": 1.0}),
    (PROMPT, {"cfg_end": 0.5, "negative_prompt": "a dog and a cat"}),
    (PROMPT, {"sampler": "heun"}),
    (PROMPT, TASKS["image"]),
    (PROMPT, TASKS["mask"]),
    (PROMPT, {}),
)


def same(eager: Pipeline, replayed: Pipeline, runs: Any = RUNS) -> bool:
    """Whether every picture is."""
    pairs = ((eager(p, **(ASKED | more)), replayed(p, **(ASKED | more))) for p, more in runs)
    return all(a.latents.tobytes() == b.latents.tobytes() and np.array_equal(a.pixels, b.pixels) for a, b in pairs)


@pytest.mark.parametrize(
    "load",
    ["qwen", "sd15", *(pytest.param(kind, marks=[pytest.mark.slow]) for kind in ("sdxl+refiner", "inpaint", "toy"))],
    indirect=True,
)
def test_every_family_draws_the_same_bits(load: Opened) -> None:
    assert same(load("cpu"), recorded(load("cpu")))
    replays = [graph.replays for graph in Rerun.made]
    print(f"{len(replays)} graphs, replayed {replays}")
    assert sum(replays) > 20 and max(replays) > 4


@pytest.mark.parametrize("load", ["qwen"], indirect=True)
@pytest.mark.parametrize("together", [True, False])
def test_branches_in_one_batch_and_in_turn(load: Opened, together: bool) -> None:
    eager, replayed = load("cpu", "bf16"), recorded(load("cpu", "bf16"))
    eager.model.batch_guidance = replayed.model.batch_guidance = together  # type: ignore[attr-defined]
    assert same(eager, replayed, [*RUNS[:5], ("x", {"negative_prompt": "y"})])


@pytest.mark.parametrize("load", ["qwen", pytest.param("sd15", marks=pytest.mark.slow)], indirect=True)
def test_on_a_device_that_is_not_the_cpu(load: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending():
        monkeypatch.setattr(backends, "load", lambda name: pretend_engine())
        eager, replayed = load("cpu"), recorded(load("cpu"))
        assert same(eager, replayed, RUNS[:3])
        assert isinstance(Rerun.made[0].result, Shell)


@pytest.mark.parametrize("load", ["qwen"], indirect=True)
def test_few_are_kept_and_none_behind_other_weights(load: Opened, tiny_folder: Path, tmp_path: Path) -> None:
    pipe = recorded(load("cpu"))
    for side in (32, 48, 64, 80, 96):
        pipe(PROMPT, **(ASKED | {"width": side, "steps": 2, "guidance": 1.0}))
    (forward,) = pipe.engine._recorded  # type: ignore[attr-defined]
    assert len(Rerun.made) == 5 and len(forward._tapes) == graphs.MOST
    lora = write_lora(tiny_folder, "qwen", tmp_path / "l.safetensors", 1)
    large = {"width": 96, "guidance": 1.0}
    assert same(load("cpu"), pipe, [(PROMPT, large), (PROMPT, large | {"lora": f"{lora}:0.7"})])
    assert len(Rerun.made) == 6, "recorded anew with other weights"


@pytest.mark.parametrize("load", ["qwen", "sd15"], indirect=True)
def test_a_step_cache_and_a_look_inside_are_eager(load: Opened) -> None:
    pipe = recorded(load("cpu"))
    assert same(load("cpu"), pipe, [(PROMPT, {"step_cache": 0.5})]) and not Rerun.made
    seen: list[str] = []
    with pipe.engine.observe(lambda operation, path, result: seen.append(operation)):
        pipe(PROMPT, **ASKED)
    assert "attention" in seen and not Rerun.made


# Of what a call is given, in the order of the forward: latents first, modulation or time behind them.
@pytest.mark.parametrize("load", ["qwen", pytest.param("sd15", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_what_is_not_copied_is_seen(load: Opened, monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
    """By the first call in which that changes, which goes on without graphs; and by these tests where it does not
    look."""
    fill, warned = graphs.Tape.fill, list[str]()

    def forgetful(self: graphs.Tape, given: tuple[Any, ...]) -> None:
        first = getattr(self, "begun", None) is None
        self.begun = True  # type: ignore[attr-defined]
        fill(self, given if first else tuple(self.inputs[i] if i == left_out else x for i, x in enumerate(given)))

    monkeypatch.setattr(graphs.Tape, "fill", forgetful)
    eager, runs = load("cpu"), [("a", {}), ("b", {})]
    watching = recorded(load("cpu", notify=lambda kind, text: warned.append(text)))
    for pipe in (eager, watching):
        if hasattr(pipe.model, "batch_guidance"):
            pipe.model.batch_guidance = False
    assert same(eager, watching, runs)
    told = [line for line in warned if "CUDA graphs" in line]
    trusting = recorded(load("cpu"))
    if hasattr(trusting.model, "batch_guidance"):
        trusting.model.batch_guidance = False
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    assert not same(eager, trusting, runs)
    print(told)
    assert told == ["no CUDA graphs from here on: a replay gave other bits than the same kernels one by one; "
                    "--graphs off asks for none"]  # fmt: skip


@pytest.mark.parametrize("load", ["qwen", "sd15"], indirect=True)
def test_a_capture_that_fails_is_one_line(load: Opened) -> None:
    told: list[str] = []
    pipe = recorded(load("cpu", notify=lambda kind, text: told.append(text)), Broken)
    assert same(load("cpu"), pipe, RUNS[:2])
    lines = [line for line in told if "graphs" in line]
    assert len(lines) == 1 and "not permitted when stream is capturing; --graphs off" in lines[0]


def test_blocks_that_are_streamed_are_not_recorded(tiny_folder: Path) -> None:
    told: list[str] = []
    pipe = recorded(qwenimg.load(tiny_folder, "cpu", "fp32", notify=lambda kind, text: told.append(text)))
    part = pipe.checkpoint["transformer"]  # type: ignore[index]
    half = streaming.fitting(pipe.runtime.plan(part), part.streamable, pipe.runtime.weight_bytes(part) // 2)
    pipe.runtime.open(replace(part, plan=streaming.as_in(part.plan, half)), "transformer")
    assert not pipe.engine._recorded  # type: ignore[attr-defined]
    assert [line for line in told if "graphs" in line] == ["no graphs: 3 blocks of the denoiser are streamed"]


# The decision


@pytest.mark.parametrize(
    ("mode", "missing", "step", "on", "said"),
    [
        ("auto", "", 0.001, True, "launching takes about 6.8 ms a step, computing at most 2.0"),
        ("auto", "", 0.005, False, "computing at most 10.0"),
        ("auto", "", 0.0, False, "off"),
        ("auto", "needs --backend cuda: MLX has none", 0.001, False, "off, since it needs --backend cuda: MLX"),
        ("on", "", 9.0, True, "--graphs on"),
        ("off", "", 0.001, False, "--graphs off"),
    ],
)
def test_the_decision(mode: str, missing: str, step: float, on: bool, said: str) -> None:
    made = recording.decide(mode, missing, 684, step)
    assert made.on is on and said in made.line


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_where_there_are_none_is_one_line(backend: str) -> None:
    with pytest.raises(BackendMissing, match=r"--graphs on needs --backend cuda: .*; use --graphs off"):
        qwenimg.load("shapes", backend, graphs="on")
    ran = cli("a red circle", "-m", "shapes", "--backend", backend, "--graphs", "on", "--quiet")
    ran.refused(3, "--graphs on needs --backend cuda")


PAPER = json.loads((Path(__file__).parents[2] / "docs" / "results" / "on-paper.json").read_text())


def parameters(network: str, config: Any) -> int:
    """That are read in every call."""
    row = import_module(f"qwenimg.common.networks.{network}").NETWORK
    return sum(use.residency == ALWAYS for use in row.uses(row.manifest(config)).values())


@pytest.mark.parametrize("name", ["Qwen-Image", "sd15", "sdxl"])
def test_auto_is_on_only_where_launches_dominate_on_paper(name: str) -> None:
    """By the kernels that the dispatcher hands out and their time on an H100. Parameters say about how many they
    are."""
    subject = published(name)
    assert subject is not None
    count, found = parameters(*subject.denoiser), dict[str, bool]()
    for row in PAPER:
        if row["model"].split(",")[0] == name and row["arm"] == "ours":
            eager = row["eager"]
            assert count <= 1.05 * eager["kernels"]
            on = recording.decide("auto", "", count, eager["products"] + eager["attention"]).on
            found[row["size"]] = on
            assert not on or recording.LAUNCH * eager["kernels"] > eager["seconds"]
    print(f"{name}, {count} parameters: {found}")
    assert found["512x512 x 2"] is (name != "Qwen-Image") and not found["1024x1024 x 2"]
