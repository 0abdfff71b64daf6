"""The flow-match schedule, and Euler's steps on it, against diffusers, published numbers and a closed form."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from diffusers.schedulers import scheduling_flow_match_euler_discrete as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.sampling.flow_match import SPREADS, FlowMatchConfig, by_size, flow_schedule
from qwenimg.common.sampling.ode import euler
from qwenimg.common.sampling.spacing import beta_quantile
from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.types import Schedule

QWEN = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
LIGHTNING = QWEN | {"base_shift": math.log(3), "max_shift": math.log(3), "shift_terminal": None}
CONFIGS = {
    "qwen": QWEN,
    "lightning": LIGHTNING,
    "diffusers defaults, dynamic": {"use_dynamic_shifting": True},
    "linear": QWEN | {"time_shift_type": "linear"},
    "linear, no terminal": QWEN | {"time_shift_type": "linear", "shift_terminal": None},
    "terminal 0": QWEN | {"shift_terminal": 0.0},
    "static 1": {},
    "static 3": {"shift": 3.0},
    "static 1.15 with terminal": {"shift": 1.15, "shift_terminal": 0.1},
}
SIZES = [(1328, 1328), (1664, 928), (928, 1664), (1472, 1104), (1104, 1472), (1584, 1056), (1056, 1584)]
STEPS = [1, 2, 3, 4, 8, 20, 28, 50, 1000]


def tokens_of(width: int, height: int) -> int:
    return (width // 16) * (height // 16)


def reference(config: dict, steps: int, tokens: int) -> FlowMatchEulerDiscreteScheduler:
    """diffusers' scheduler, set as its Qwen-Image pipeline sets it."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    known = scheduler.config
    mu = calculate_shift(tokens, known.base_image_seq_len, known.max_image_seq_len, known.base_shift, known.max_shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    return scheduler


def largest_difference(config: dict, steps: int, tokens: int) -> float:
    ours, theirs = FlowMatchConfig(**config), reference(config, steps, tokens)
    sigmas = flow_schedule(ours, steps, tokens)
    times = [ours.timestep(sigma) for sigma in sigmas[:-1]]
    assert len(sigmas) == steps + 1
    assert theirs.sigmas.dtype == theirs.timesteps.dtype == torch.float32
    worst = np.abs(np.array(sigmas) - theirs.sigmas.double().numpy()).max()
    return float(max(worst, np.abs(np.array(times) - theirs.timesteps.double().numpy()).max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_diffusers_bit_for_bit(name):
    config, count, worst = CONFIGS[name], 0, 0.0
    for size in [*SIZES, (256, 256), (512, 512), (1024, 1024), (16, 16), (4096, 2064)]:
        for steps in STEPS:
            if steps == 1 and config.get("shift_terminal"):
                continue  # diffusers yields NaN: see the test below
            worst, count = max(worst, largest_difference(config, steps, tokens_of(*size))), count + 1
    print(f"{name}: {count} schedules, largest difference {worst}")
    assert worst == 0


@settings(max_examples=60)
@given(steps=st.integers(2, 300), tokens=st.integers(1, 40_000), name=st.sampled_from(list(CONFIGS)))
def test_equals_diffusers_everywhere(steps, tokens, name):
    assert largest_difference(CONFIGS[name], steps, tokens) == 0


@pytest.mark.parametrize("name", SPREADS)
def test_levels_that_are_spread_anew_equal_diffusers(name, monkeypatch):
    """Karras, exponential and beta, between the ends of the model's own schedule. diffusers asks scipy, which is not
    here, for quantiles alone: they are ours, which test_schedules.py checks."""
    quantiles = SimpleNamespace(ppf=lambda share, a, b: beta_quantile(float(share), a))
    monkeypatch.setattr(theirs, "scipy", SimpleNamespace(stats=SimpleNamespace(beta=quantiles)), raising=False)
    monkeypatch.setattr(theirs, "is_scipy_available", lambda: True)
    worst = moved = 0.0
    for config in CONFIGS.values():
        for steps in (1, 2, 8, 28):
            if steps == 1 and config.get("shift_terminal"):
                continue
            sigmas = np.array(flow_schedule(FlowMatchConfig(**config), steps, 4096, spread=SPREADS[name]))
            spread, own = (
                reference(made, steps, 4096).sigmas.double().numpy()
                for made in (config | {f"use_{name}_sigmas": True}, config)
            )
            worst, moved = max(worst, np.abs(sigmas - spread).max()), max(moved, np.abs(sigmas - own).max())
    print(f"{name}: largest difference {worst:.1e}, from the model's own schedule {moved:.2f}")
    assert worst <= 6e-8 < 0.1 < moved  # a unit of float32 at 1


@pytest.mark.parametrize(
    ("config", "size", "steps", "expected"),
    [
        (QWEN, (512, 512), 4, [1, 0.749268, 0.432588, 0.02, 0]),
        (QWEN, (1024, 1024), 4, [1, 0.766709, 0.455614, 0.02, 0]),
        (QWEN, (1328, 1328), 4, [1, 0.780980, 0.475549, 0.02, 0]),
        (LIGHTNING, (1024, 1024), 4, [1, 0.9, 0.75, 0.5, 0]),
        (LIGHTNING, (512, 512), 8, [1, 0.954545, 0.9, 0.833333, 0.75, 0.642857, 0.5, 0.3, 0]),
    ],
)
def test_published_numbers(config, size, steps, expected):
    ours = FlowMatchConfig(**config)
    sigmas = flow_schedule(ours, steps, tokens_of(*size))
    np.testing.assert_allclose(sigmas, expected, rtol=0, atol=6e-7)  # written down to six places
    np.testing.assert_allclose([ours.timestep(sigma) for sigma in sigmas], 1000 * np.array(sigmas), rtol=1e-7)


@pytest.mark.parametrize(
    ("size", "mu"),
    [((512, 512), 0.538710), ((1024, 1024), 0.693548), ((1328, 1328), 0.834325), ((1664, 928), 0.791129)],
)
def test_mu(size, mu):
    assert by_size(FlowMatchConfig(**QWEN), tokens_of(*size), 1) == pytest.approx(mu, abs=6e-7)


def test_one_step_with_a_terminal_starts_at_pure_noise():
    with np.errstate(all="ignore"):
        assert torch.isnan(reference(QWEN, 1, 4096).sigmas[0])
    for config in (QWEN, LIGHTNING):
        assert flow_schedule(FlowMatchConfig(**config), 1, 4096) == (1.0, 0.0)
    assert FlowMatchConfig(**QWEN).timestep(1.0) == 1000.0


@settings(max_examples=100)
@given(
    steps=st.integers(1, 1000),
    tokens=st.integers(1, 1024 * 1024),
    base=st.floats(-100, 100),
    top=st.floats(-100, 100),
    terminal=st.none() | st.floats(0, 0.999),
    kind=st.sampled_from(["exponential", "linear"]),
)
def test_schedule_is_sane_or_refused(steps, tokens, base, top, terminal, kind):
    config = FlowMatchConfig(
        use_dynamic_shifting=True, base_shift=base, max_shift=top, shift_terminal=terminal, time_shift_type=kind
    )
    try:
        schedule = flow_schedule(config, steps, tokens)
    except UsageError as error:
        assert "\n" not in str(error)
        return
    sigmas = np.array(schedule)
    assert np.isfinite(sigmas).all() and sigmas[-1] == 0 and (sigmas[:-1] > 0).all() and sigmas[0] <= 1
    assert (np.diff(sigmas) <= 0).all()
    numbers = (*schedule, *map(config.timestep, schedule))
    assert all(type(number) is float and number == np.float32(number) for number in numbers)


def test_the_largest_image_is_refused_in_one_line():
    with pytest.raises(UsageError, match="1048576 image tokens"):
        flow_schedule(FlowMatchConfig(**QWEN), 20, 1024 * 1024)


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_steps_out_of_range(steps):
    with pytest.raises(UsageError, match="1 to 1000"):
        flow_schedule(FlowMatchConfig(), steps, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"invert_sigmas": True}, "invert_sigmas is true"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas is true"),
        ({"use_exponential_sigmas": True}, "use_exponential_sigmas is true"),
        ({"use_beta_sigmas": True}, "use_beta_sigmas is true"),
        ({"stochastic_sampling": True}, "stochastic_sampling is true"),
        ({"time_shift_type": "cubic\n"}, r"time_shift_type is 'cubic\\"),
        ({"shift": 0.0}, "shift is 0.0, expected above 0"),
        ({"shift": math.inf}, "shift is inf"),
        ({"base_shift": math.nan}, "base_shift is nan"),
        ({"max_shift": 1e9}, "max_shift is 1000000000.0"),
        ({"shift_terminal": 1.0}, "shift_terminal is 1.0"),
        ({"shift_terminal": -0.1}, "shift_terminal is -0.1"),
        ({"num_train_timesteps": 0}, "num_train_timesteps is 0"),
        ({"use_dynamic_shifting": True, "max_image_seq_len": 256}, "max_image_seq_len is 256, expected above"),
    ],
)
def test_unsupported_configs(change, message):
    with pytest.raises(ModelError, match=message) as caught:
        FlowMatchConfig(**change)
    assert "\n" not in str(caught.value)


# Euler's steps


def no_noise():
    raise AssertionError("Euler's method takes no noise")


@pytest.mark.parametrize("steps", [4, 20])
def test_steps_are_those_of_diffusers(steps):
    sigmas, theirs = flow_schedule(FlowMatchConfig(**QWEN), steps, 4096), reference(QWEN, steps, 4096)
    generator = torch.Generator().manual_seed(7)
    expected = torch.randn(1, 35, 64, generator=generator)
    velocities = {sigma: 3 * torch.randn(1, 35, 64, generator=generator) for sigma in sigmas[:-1]}
    levels = Schedule(sigmas=sigmas, flow=True)
    made = unchanged(euler(expected, levels, lambda x, sigma: x - sigma * velocities[sigma], no_noise))
    worst = 0.0
    for t, sigma, x in zip(theirs.timesteps, sigmas, made, strict=False):
        expected = theirs.step(velocities[sigma], t, expected).prev_sample
        assert x.dtype == torch.float32
        worst = max(worst, float((x - expected).abs().max()))
    print(f"{steps} steps: largest difference {worst:.1e}")
    assert worst <= 1e-5  # float32, by way of the image; measured 1.5e-6


def test_euler_converges_with_order_one():
    """Images from N(m, s^2): the flow maps each noise value affinely, in closed form. float64 throughout."""
    m, s = 1.7, 0.6
    noise = np.linspace(-3, 3, 41)

    def deviation(sigma):
        return math.sqrt(((1 - sigma) * s) ** 2 + sigma**2)

    def velocity(x, sigma):
        slope = (sigma - (1 - sigma) * s * s) / deviation(sigma) ** 2
        return -m + slope * (x - (1 - sigma) * m)

    errors = []
    for steps in (50, 100, 200, 400):
        grid = Schedule(sigmas=flow_schedule(FlowMatchConfig(shift=3.0), steps, 1), flow=True)
        *_, x = unchanged(euler(noise, grid, lambda x, sigma: x - sigma * velocity(x, sigma), no_noise))
        errors.append(float(np.abs(x - (m + s * noise)).max()))
    orders = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    print("errors", [f"{e:.3g}" for e in errors], "orders", [f"{o:.3f}" for o in orders])
    assert errors[-1] < 0.02
    assert all(0.9 < order < 1.1 for order in orders)
