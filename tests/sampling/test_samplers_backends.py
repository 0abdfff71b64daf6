"""What samplers do to arrays: the same bits on numpy, torch and MLX, only + - x, and no look at x."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
import torch
from support.sampler_reference import SD

from qwenimg.common.base.errors import NumericsError
from qwenimg.common.pipeline.steps.denoiser import RECENT
from qwenimg.common.sampling.discrete import parse_diffusion
from qwenimg.common.sampling.schedules import build
from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.common.sampling.types import Schedule

SHAPE = (1, 4, 5, 3)
CONFIG = parse_diffusion({"_class_name": "DDIMScheduler", **SD, "steps_offset": 1}, "scheduler_config.json")
FLOW = Schedule(sigmas=(1.0, 0.93, 0.81, 0.66, 0.45, 0.21, 0.07, 0.0), flow=True)
MAKE = {"numpy": lambda array: array, "torch": torch.from_numpy, "mlx": mx.array}
CASES = [(name, flow) for name, sampler in SAMPLERS.items() for flow in (False, True) if sampler.flow or not flow]


class Given:
    """The same images, one after the other, whatever it is asked."""

    def __init__(self, make):
        generator = np.random.default_rng(3)
        base = generator.standard_normal(SHAPE)
        images = (base + 0.05 * generator.standard_normal(SHAPE) for _ in itertools.count())
        self.images = (make(image.astype(np.float32)) for image in images)
        self.asked: list[float] = []

    def __call__(self, x, sigma):
        assert type(sigma) is float
        self.asked.append(sigma)
        return next(self.images)

    def both(self, x, sigma):
        return self(x, sigma), next(self.images)


class Recorder:
    def __init__(self) -> None:
        self.asked: list[float] = []

    def __call__(self, x, sigma):
        self.asked.append(sigma)
        return 0.0

    def both(self, x, sigma):
        return self(x, sigma), 0.0


def run(name: str, levels: Schedule, make) -> tuple[list[np.ndarray], list[float]]:
    generator, denoise = np.random.default_rng(5), Given(make)

    def draw():
        return make(generator.standard_normal(SHAPE).astype(np.float32))

    start = levels.initial * make(np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32))
    more = (lambda x: np.asarray(x, dtype=np.float64),) if SAMPLERS[name].adaptive else ()
    states = list(unchanged(SAMPLERS[name].function(start, levels, denoise, draw, *more)))
    assert all(type(state) is type(start) for state in states)
    return [np.asarray(state) for state in states], denoise.asked


@pytest.mark.parametrize(("name", "flow"), CASES)
def test_all_frameworks_give_the_same_bits(name, flow):
    levels = FLOW if flow else build(CONFIG, SAMPLERS[name].rule, "model", 7)
    expected, _ = run(name, levels, MAKE["numpy"])
    assert expected[-1].dtype == np.float32 and np.isfinite(expected[-1]).all()
    for framework in ("torch", "mlx"):
        found, _ = run(name, levels, MAKE[framework])
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_array_equal(ours, theirs)


class Plain:
    """An array that can be added, subtracted and multiplied by a Python float, and nothing else."""

    def __init__(self, value: np.ndarray):
        self.value = value

    def __add__(self, other):
        return Plain(self.value + other.value)

    def __sub__(self, other):
        return Plain(self.value - other.value)

    def __rmul__(self, number):
        assert type(number) is float
        return Plain(number * self.value)

    def __array__(self, dtype=None, copy=None):
        return self.value.astype(dtype or self.value.dtype)


@pytest.mark.parametrize(("name", "flow"), CASES)
def test_arrays_are_added_subtracted_and_multiplied_by_floats_only(name, flow):
    """No division: those of GPUs are not all rounded alike."""
    levels = FLOW if flow else build(CONFIG, SAMPLERS[name].rule, "model", 7)
    expected, _ = run(name, levels, MAKE["numpy"])
    found, _ = run(name, levels, Plain)
    np.testing.assert_array_equal(found[-1], expected[-1])


@pytest.mark.parametrize(("name", "flow"), CASES)
def test_no_step_asks_the_model_more_often_than_is_remembered(name, flow):
    """Else the evaluation that overflowed may be forgotten before its layer is searched for."""
    levels = FLOW if flow else build(CONFIG, SAMPLERS[name].rule, "model", 7)
    denoise = Given(MAKE["numpy"])
    more = (np.asarray,) if SAMPLERS[name].adaptive else ()
    states, before = SAMPLERS[name].function(np.ones(SHAPE), levels, denoise, lambda: np.ones(SHAPE), *more), 0
    for _ in unchanged(states):
        asked, before = len(denoise.asked) - before, len(denoise.asked)
        assert asked <= RECENT, f"{name} asks {asked} times in a step: raise RECENT"


@pytest.mark.parametrize(("name", "flow"), [(n, f) for n, f in CASES if not SAMPLERS[n].adaptive])
def test_a_run_on_floats_tells_where_the_model_is_asked(name, flow):
    levels = FLOW if flow else build(CONFIG, SAMPLERS[name].rule, "karras", 7)
    recorder = Recorder()
    for _ in unchanged(SAMPLERS[name].function(0.0, levels, recorder, lambda: 0.0)):
        pass
    _, asked = run(name, levels, MAKE["numpy"])
    print(f"{name}: {len(asked)} evaluations")
    assert recorder.asked == asked
    assert all(type(sigma) is float and sigma > 0 for sigma in recorder.asked)


@pytest.mark.parametrize(("name", "sampler"), SAMPLERS.items())
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps(name, sampler, steps):
    for levels in (
        build(CONFIG, SAMPLERS[name].rule, "karras", steps),
        Schedule(sigmas=FLOW.sigmas[-steps - 1 :], flow=True),
    ):
        if levels.flow and not sampler.flow:
            continue
        states, asked = run(name, levels, MAKE["numpy"])
        assert states and np.isfinite(states[-1]).all() and asked


def test_dpm_adaptive_says_so_where_it_finds_no_end():
    levels, draws = Schedule(sigmas=(14.6, 0.03)), np.random.default_rng(0)

    class Random:
        def __call__(self, x, sigma):
            return 1e4 * draws.standard_normal(SHAPE)

    with pytest.raises(NumericsError, match="no end"):
        list(unchanged(SAMPLERS["dpm_adaptive"].function(np.zeros(SHAPE), levels, Random(), None, lambda x: x)))
    with pytest.raises(NumericsError, match="not finite"):
        nan = np.full(SHAPE, np.nan)
        list(unchanged(SAMPLERS["dpm_adaptive"].function(nan, levels, lambda x, sigma: x, None, lambda x: x)))


class Shrinking(Recorder):
    def __call__(self, x, sigma):
        self.asked.append(sigma)
        return 0.3 * x / (1 + sigma)

    def both(self, x, sigma):
        return self(x, sigma), 0.9 * self(x, sigma)


@pytest.mark.parametrize(("name", "flow"), CASES)
def test_it_goes_on_from_what_is_sent(name, flow):
    levels = FLOW if flow else build(CONFIG, SAMPLERS[name].rule, "model", 7)
    more, ends = (np.asarray,) if SAMPLERS[name].adaptive else (), list[float]()
    for change in (0.0, 0.01):
        start = levels.initial * np.ones(SHAPE)
        states = SAMPLERS[name].function(start, levels, Shrinking(), lambda: np.zeros(SHAPE), *more)
        ends.append(states.send(next(states) + change).mean())
    share = (ends[1] - ends[0]) / 0.01
    print(f"{name}: {share:.2e} of a change is there after a step")
    assert 0.01 < abs(share) < 3


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize(
    "fields",
    [
        {"final_sigmas_type": "sigma_min", "set_alpha_to_one": False},
        {"use_karras_sigmas": True, "final_sigmas_type": "sigma_min"},
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    ],
)
def test_every_configuration_gives_finite_numbers(spacing, fields):
    config = parse_diffusion({"_class_name": "DDIMScheduler", **SD, "timestep_spacing": spacing, **fields}, "x")
    for name, sampler in SAMPLERS.items():
        for steps in (1, 2, 3, 5, 17, 50):
            levels = build(config, SAMPLERS[name].rule, "model", steps)
            more = (lambda x: np.asarray(x, dtype=np.float64),) if sampler.adaptive else ()
            states = list(unchanged(sampler.function(levels.initial, levels, Shrinking(), lambda: 0.5, *more)))
            assert states and np.isfinite(levels.final * states[-1]), (name, steps)
