"""Phases, presets and the estimate of memory as data; the dtype of a step, the loss scaler and its fall-back."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from training.config import ShapesConfig, learning_rate
from training.learner import StageLearner
from training.optimizer import Optimizer
from training.run import recommend

from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.training import config
from qwenimg.common.training.loop import Loop
from qwenimg.common.training.scaler import LossScaler

CPU = torch.device("cpu")


# Phases


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("conservative", ["float32"] * 4),
        ("default", ["float32", "float32", "bfloat16", "float32"]),
        ("aggressive", ["bfloat16"] * 3 + ["float32"]),
        ("fp16", ["float16"] * 4),
    ],
)
def test_presets(preset: str, expected: list[str]):
    assert [phase.dtype for phase in config.plan_phases(preset, 1000)] == expected


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 99, 1000, 12345])
def test_no_step_is_skipped(steps: int):
    phases = config.plan_phases("default", steps, "warm-up=12.5,full=21,predict=53.5,correct=13")
    covered = [step for phase in phases for step in range(phase.start, phase.stop)]
    assert covered == list(range(steps))
    assert all(config.phase_at(phases, s).start <= s < config.phase_at(phases, s).stop for s in range(steps))


def test_memory_estimate():
    phases = config.plan_phases("default", 1000, "warm-up=10,full=20,predict=60,correct=10")
    assert config.memory_estimate(phases) == pytest.approx(0.1 + 0.2 + 0.6 * 0.5 + 0.1)
    assert config.memory_estimate(config.plan_phases("conservative", 1000)) == 1
    assert config.memory_estimate(config.plan_phases("aggressive", 1000)) == pytest.approx(0.9 * 0.5 + 0.1)


def test_a_phase_may_have_its_own_dtype():
    phases = config.plan_phases("conservative", 100, "full=40,predict=50:fp16,correct=10:bf16")
    assert config.describe_phases(phases) == "full 0-39 fp32, predict 40-89 fp16, correct 90-99 bf16"


@pytest.mark.parametrize(
    ("shares", "part"),
    [
        ("warm=100", "'warm' is not a phase; the phases are warm-up, full, predict, correct"),
        ("full=50,predict=40", "add up to 90 %"),
        ("full=x,predict=40", "share of full is 'x'"),
        ("full=-1,predict=101", "from 0 to 100"),
        ("full=nan", "from 0 to 100"),
        ("full=100:fp8", "'fp8' is not one of fp32, bf16, fp16"),
    ],
)
def test_unknown_phases_are_one_line(shares: str, part: str):
    with pytest.raises(UsageError) as caught:
        config.plan_phases("default", 100, shares)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_preset():
    with pytest.raises(UsageError, match="'quick' is not one of auto, conservative, default, aggressive, fp32"):
        config.plan_phases("quick", 100)


def test_auto_says_why():
    preset, reason = recommend(CPU)
    print(preset, reason)
    assert preset == "fp32"
    assert "slower" in reason


def test_learning_rate_goes_up_and_down():
    rates = [learning_rate(step, 1000, 1e-3) for step in range(1000)]
    assert max(rates) == pytest.approx(1e-3)
    assert rates[0] == pytest.approx(1e-3 / 50)
    assert rates[:50] == sorted(rates[:50])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(1e-3 * config.FINAL_RATE, rel=1e-2)


# The scaler


def test_scale_grows_and_backs_off():
    scaler = LossScaler(scale=8.0, interval=3)
    for _ in range(3):
        scaler.finite()
    assert (scaler.scale, scaler.growths) == (16.0, 1)
    scaler.finite()
    scaler.overflow()
    assert (scaler.scale, scaler.back_offs, scaler.good) == (8.0, 1, 0)
    assert not scaler.collapsed


def test_scale_stays_below_its_largest():
    scaler = LossScaler(scale=2.0**24, interval=1)
    scaler.finite()
    assert scaler.scale == 2.0**24


class Part(NamedTuple):
    share: int  # rows of the batch
    loss: Callable[[], torch.Tensor]


class Toy:
    """A stage whose step has these parts, each of so many rows; their losses depend on `model`."""

    def __init__(self, model: torch.nn.Module, *parts: Part):
        self.model, self.parts = model, parts

    def blocks(self) -> list[torch.nn.Module]:
        return []

    def count(self, step: int) -> int:
        return sum(part.share for part in self.parts)

    def batch(self, step: int) -> None:
        return None

    def loss(self, batch: None, rows: slice) -> torch.Tensor:
        """The mean loss of the rows, each that of its part."""
        of_rows = [number for number, part in enumerate(self.parts) for _ in range(part.share)][rows]
        losses = {number: self.parts[number].loss() for number in set(of_rows)}
        return torch.stack([losses[number] for number in of_rows]).mean()


def make(
    out: Path, precision: str, scaler: LossScaler, model: torch.nn.Module, *parts: Part, accumulate: int = 1
) -> tuple[Loop, list[str]]:
    """The loop of a run of ten steps."""
    told: list[str] = []
    made = ShapesConfig(stage="dit", out=out, steps=10, batch=4, accumulate=accumulate, precision=precision, threads=1)
    (out / "training").mkdir(parents=True)
    learner = StageLearner(made, Toy(model, *parts), CPU)
    loop = Loop(
        made,
        learner,
        Optimizer(learner.parameters, []),
        config.plan_phases(precision, 10),
        lambda step: 1e-3,
        told.append,
        save_every=10,
    )
    loop.scaler = scaler
    return loop, told


def linear() -> torch.nn.Linear:
    """A layer of ones, without a bias."""
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


def fit(layer: torch.nn.Linear, gain: float) -> Callable[[], torch.Tensor]:
    """A loss through a matrix product, in the dtype that autocast gives it: its gradient is 2 gain."""
    x = torch.full((1, 2), gain)
    return lambda: layer(x).float().mean() * 2


def test_gradients_are_unscaled_and_accumulated(tmp_path: Path):
    layer = linear()
    parts = Part(1, fit(layer, 1.0)), Part(3, fit(layer, 3.0))
    loop, told = make(tmp_path, "fp16", LossScaler(scale=1024.0), layer, *parts, accumulate=4)
    loss, gradients, length = loop.gradients(0)
    assert loss == pytest.approx(0.25 * 4 + 0.75 * 12)
    assert gradients["weight"].tolist() == [[5.0, 5.0]]  # 0.25 * 2 + 0.75 * 6, exact in float16
    assert length == pytest.approx(50**0.5)
    assert told == []


def test_overflow_backs_off_and_does_the_step_again(tmp_path: Path):
    """A gradient of 8 overflows float16 (65,504) at scales of 8192 and above: two halvings from 2^14."""
    layer, scaler = linear(), LossScaler(scale=2.0**14)
    loop, told = make(tmp_path, "fp16", scaler, layer, Part(4, fit(layer, 4.0)))
    _, gradients, _ = loop.gradients(0)
    print(scaler)
    assert gradients["weight"].tolist() == [[8.0, 8.0]]
    assert scaler.back_offs == 2
    assert scaler.scale == 2.0**12
    assert told == []


def test_collapse_falls_back_to_bfloat16_and_says_so(tmp_path: Path):
    """A loss of 2^17 is infinite in float16 at any scale, and a plain number in bfloat16."""
    layer, scaler = linear(), LossScaler(scale=4.0)
    loop, told = make(tmp_path, "fp16", scaler, layer, Part(4, fit(layer, 2.0**16)))
    loss, _, _ = loop.gradients(3)
    assert loss == 2.0**18
    assert scaler.collapsed
    assert loop.dtype(4) == "bfloat16"
    assert len(told) == 1
    assert "step 3: float16 overflows at loss scale 1; bfloat16 from here on" in told[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_a_number_is_an_error(precision: str, tmp_path: Path):
    layer = linear()
    loop, _ = make(tmp_path, precision, LossScaler(scale=2.0), layer, Part(4, fit(layer, math.nan)))
    with pytest.raises(NumericsError, match=r"step 5: the loss is nan .*; nothing was saved yet: start again, with"):
        loop.gradients(5)


def test_kept_bytes_are_counted_once_per_dtype(tmp_path: Path):
    """Two layers of 1000 x 30 keep a weight of 30 x 30 and their inputs: exact in float32, and less in bfloat16."""
    model = torch.nn.Sequential(*(torch.nn.Linear(30, 30, bias=False) for _ in range(2)))
    x = torch.randn(1000, 30)
    kept = {}
    for precision in ("fp32", "bf16"):
        part = Part(4, lambda: model(x).float().mean())
        loop, _ = make(tmp_path / precision, precision, LossScaler(), model, part)
        for step in (0, 1):
            loop.gradients(step)
        kept |= loop.learner.kept
    print(kept)
    assert kept["float32"] == 4 * (1000 * 30 * 2 + 30 * 30)
    assert kept["bfloat16"] < 0.6 * kept["float32"]
