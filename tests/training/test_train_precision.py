"""Phases, presets and the estimate of memory as data; the dtype of a step, the loss scaler and its fall-back."""

from __future__ import annotations

import math

import pytest
import torch

from qwenimg.backends.torch.training.precision import LossScaler, MixedPrecision, recommend
from qwenimg.common.base.errors import NumericsError, UsageError
from qwenimg.common.training import config

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
    rates = [config.learning_rate(step, 1000, 1e-3) for step in range(1000)]
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


def make(precision: str, scaler: LossScaler) -> tuple[MixedPrecision, list[str]]:
    told: list[str] = []
    return MixedPrecision(config.plan_phases(precision, 10), CPU, scaler, told.append), told


def fit(parameter: torch.Tensor, gain: float):
    """A loss through a matrix product, in the dtype that autocast gives it: its gradient is 2 gain."""
    x = torch.full((1, 2), gain)
    return lambda: torch.nn.functional.linear(x, parameter).float().mean() * 2


def test_gradients_are_unscaled_and_accumulated():
    weight = torch.nn.Parameter(torch.ones(1, 2))
    mixed, told = make("fp16", LossScaler(scale=1024.0))
    loss = mixed.gradients(0, [(0.25, fit(weight, 1.0)), (0.75, fit(weight, 3.0))], [weight])
    assert loss == pytest.approx(0.25 * 4 + 0.75 * 12)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[5.0, 5.0]]  # 0.25 * 2 + 0.75 * 6, exact in float16
    assert told == []


def test_overflow_backs_off_and_does_the_step_again():
    """A gradient of 8 overflows float16 (65,504) at scales of 8192 and above: two halvings from 2^14."""
    weight = torch.nn.Parameter(torch.ones(1, 2))
    scaler = LossScaler(scale=2.0**14)
    mixed, told = make("fp16", scaler)
    mixed.gradients(0, [(1.0, fit(weight, 4.0))], [weight])
    print(scaler)
    assert weight.grad is not None
    assert weight.grad.tolist() == [[8.0, 8.0]]
    assert scaler.back_offs == 2
    assert scaler.scale == 2.0**12
    assert told == []


def test_collapse_falls_back_to_bfloat16_and_says_so():
    """A loss of 2^17 is infinite in float16 at any scale, and a plain number in bfloat16."""
    weight = torch.nn.Parameter(torch.ones(1, 2))
    scaler = LossScaler(scale=4.0)
    mixed, told = make("fp16", scaler)
    loss = mixed.gradients(3, [(1.0, fit(weight, 2.0**16))], [weight])
    assert loss == 2.0**18
    assert scaler.collapsed
    assert mixed.dtype(4) == "bfloat16"
    assert len(told) == 1
    assert "step 3: float16 overflows at loss scale 1; bfloat16 from here on" in told[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loss_that_is_not_a_number_is_an_error(precision: str):
    weight = torch.nn.Parameter(torch.ones(1, 2))
    mixed, _ = make(precision, LossScaler(scale=2.0))
    with pytest.raises(NumericsError, match="step 5: the loss is nan"):
        mixed.gradients(5, [(1.0, fit(weight, math.nan))], [weight])


def test_kept_bytes_are_counted_once_per_dtype():
    """Two layers of 1000 x 30 keep a weight of 30 x 30 and their inputs: exact in float32, and less in bfloat16."""
    first, second = (torch.nn.Linear(30, 30, bias=False) for _ in range(2))
    x = torch.randn(1000, 30)
    kept = {}
    for precision in ("fp32", "bf16"):
        mixed, _ = make(precision, LossScaler())
        for step in (0, 1):
            mixed.gradients(step, [(1.0, lambda: second(first(x)).float().mean())], [first.weight, second.weight])
        kept |= mixed.kept
    print(kept)
    assert kept["float32"] == 4 * (1000 * 30 * 2 + 30 * 30)
    assert kept["bfloat16"] < 0.6 * kept["float32"]
