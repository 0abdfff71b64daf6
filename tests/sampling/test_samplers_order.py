"""How fast samplers come near exact answers, in float64, on levels that end above 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.sampler_gaussian import MEAN, exact_ode, levels, moments, run, spread

from qwenimg.common.sampling.adaptive import _RTOL
from qwenimg.common.sampling.steps import adams, integral
from qwenimg.common.sampling.table import SAMPLERS

STEPS = 160
BAND = 0.2  # of one-step methods about their order
SECOND = 1.8  # at least, of methods that claim 2 or more and begin with lower orders
ONE_STEP = ("ddim", "euler", "heun", "dpm2", "euler_cfgpp")
MULTISTEP = (
    "pndm", "lms", "dpmpp_2m", "unipc", "deis", "ipndm", "ipndm_v", "res_multistep", "dpmpp_2m_cfgpp"
)  # fmt: skip
STOCHASTIC = [name for name, sampler in SAMPLERS.items() if sampler.stochastic and name not in ("lcm", "tcd")]


OTHERS = (
    "heunpp2",
    "dpm_fast",
    "dpm_adaptive",
    "lcm",
    "tcd",
)  # each with a test of its own, or exact for one step alone


def test_every_sampler_is_in_one_list():
    """A new sampler goes into the list whose test holds its order."""
    listed = [*ONE_STEP, *MULTISTEP, *STOCHASTIC, *OTHERS]
    new = SAMPLERS.keys() - set(listed)
    assert not new, f"put {', '.join(new)} into ONE_STEP or MULTISTEP; or into OTHERS, with a test of its order"
    assert len(listed) == len(SAMPLERS)


def kinds(names):
    return [(name, flow) for name in names for flow in (False, True) if SAMPLERS[name].flow or not flow]


def order(errors: list[float]) -> float:
    return math.log2(errors[0] / errors[1])


def ode_error(name: str, steps: int, *, flow: bool) -> float:
    """UniPC's authors take the last step with first order, so its order is that of the steps before."""
    grid = levels(steps, flow=flow)
    start = np.array([1.3, -0.4]) * grid.sigmas[0]
    place = -2 if name == "unipc" else -1
    found = run(SAMPLERS[name], start, grid, None)[place]
    return float(np.abs(found - exact_ode(start, grid, grid.sigmas[0], grid.sigmas[place])).max())


@pytest.mark.parametrize(("name", "flow"), kinds(ONE_STEP))
def test_one_step_methods_have_their_order(name, flow):
    errors = [ode_error(name, steps, flow=flow) for steps in (STEPS // 2, STEPS)]
    print(f"{name}, flow {flow}: order {order(errors):.2f}, error {errors[1]:.1e}")
    assert abs(order(errors) - SAMPLERS[name].order) < BAND


def test_heunpp2_is_of_first_order():
    errors = [ode_error("heunpp2", steps, flow=False) for steps in (STEPS // 2, STEPS)]
    print(f"heunpp2: order {order(errors):.2f}, error {errors[1]:.1e}")
    assert abs(order(errors) - 1) < BAND


@pytest.mark.parametrize(("name", "flow"), kinds(MULTISTEP))
def test_multistep_methods_have_second_order_at_least(name, flow):
    errors = [ode_error(name, steps, flow=flow) for steps in (STEPS // 2, STEPS)]
    print(
        f"{name}, flow {flow}: order {order(errors):.2f} (its rule's is {SAMPLERS[name].order}), error {errors[1]:.1e}"
    )
    assert SAMPLERS[name].order >= 2 and order(errors) > SECOND
    if name == "dpmpp_2m":
        assert order(errors) < 2 + BAND


def test_dpm_fast_has_its_order():
    """With two evaluations more than threes, the last of its steps is of second order."""
    errors = [ode_error("dpm_fast", steps, flow=False) for steps in (80, 161)]
    print(f"dpm_fast: order {order(errors):.2f}, error {errors[1]:.1e}")
    assert abs(order(errors) - SAMPLERS["dpm_fast"].order) < BAND


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_dpm_adaptive_keeps_its_tolerance(scale):
    grid = levels(10, flow=False)
    start = scale * np.random.default_rng(0).standard_normal(1000) * grid.sigmas[0]
    states = run(SAMPLERS["dpm_adaptive"], start, grid, None)
    exact = exact_ode(start, grid, grid.sigmas[0], grid.sigmas[-1])
    error = float(np.sqrt(np.mean((states[-1] - exact) ** 2)) / np.sqrt(np.mean(exact**2)))
    print(f"scale {scale}: {len(states)} steps, error {error:.2e} = {error / _RTOL:.2f} rtol")
    assert error <= 3 * _RTOL
    assert len(states) > 3


@pytest.mark.parametrize(("name", "flow"), kinds(STOCHASTIC))
def test_distributions_have_their_order(name, flow):
    errors = []
    for steps in (STEPS // 2, STEPS):
        grid = levels(steps, flow=flow)
        exact = spread(grid, grid.sigmas[-1])
        errors.append(abs(moments(SAMPLERS[name], grid)[1] / exact - 1))
    print(f"{name}, flow {flow}: order {order(errors):.2f}, error of the variance {errors[1]:.1e}")
    assert abs(order(errors) - SAMPLERS[name].order) < BAND


# Steps at which the bias is small beside what 20,000 samples can show.
SAMPLES = 20_000
MANY, FEW = 640, 160
LIMIT = 3.0  # standard errors


@pytest.mark.parametrize(("name", "flow"), kinds(STOCHASTIC))
@pytest.mark.sample(0)
def test_samples_have_mean_and_variance_of_the_target(name, flow):
    sampler = SAMPLERS[name]
    grid = levels(MANY if sampler.order == 1 or flow else FEW, flow=flow)
    first, last = grid.sigmas[0], grid.sigmas[-1]
    mean, variance = grid.alpha(last) * MEAN, spread(grid, last)
    allowed = LIMIT * math.sqrt(variance / SAMPLES), LIMIT * variance * math.sqrt(2 / (SAMPLES - 1))
    exact_mean, exact_variance = moments(sampler, grid)
    bias = abs(exact_mean - mean) / allowed[0], abs(exact_variance - variance) / allowed[1]
    assert max(bias) < 0.5

    generator = np.random.default_rng(7)
    start = grid.alpha(first) * MEAN + math.sqrt(spread(grid, first)) * generator.standard_normal(SAMPLES)
    found = run(sampler, start, grid, lambda: generator.standard_normal(SAMPLES))[-1]
    off = abs(found.mean() - mean) / allowed[0], abs(found.var(ddof=1) - variance) / allowed[1]
    print(f"{name}, flow {flow}: of 3 standard errors, mean {off[0]:.2f}, variance {off[1]:.2f}; bias {max(bias):.2f}")
    assert max(off) < 1


def test_weights_integrate_polynomials_exactly():
    nodes, after = [2.0, 2.7, 4.1, 4.6], 1.2
    weights = adams(nodes, after)
    for power in range(4):
        exact = (after ** (power + 1) - nodes[0] ** (power + 1)) / (power + 1)
        assert sum(w * n**power for w, n in zip(weights, nodes, strict=True)) == pytest.approx(exact, rel=1e-12)
    assert integral(math.exp, -1.0, 2.0) == pytest.approx(math.exp(2) - math.exp(-1), rel=1e-13)
