"""UniPC's first step from pure noise, where lambda is minus infinity: the limit of the published formula, in 80 digits,
and the order by which the step comes near the exact solution."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from support.sampler_gaussian import MEAN, VARIANCE, exact_ode, run
from support.sampler_reference import network, noises, relative, scheduler
from support.sampler_reference import run as run_theirs

from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.common.sampling.types import Schedule

UNIPC = SAMPLERS["unipc"]
LEVELS = (1.0, 0.93, 0.81, 0.66, 0.45, 0.21, 0.07, 0.0)
STARTS = (1.3, -0.4, 2.2)


def published(x: Decimal, first: Decimal) -> Decimal:
    """UniPC-2 with B(h) = exp(h) - 1 as its authors give it for predictions of the image, from lambda = `first`:
    W. Zhao et al. 2023, algorithms 1 and 2, of first order in the first and the last step. Of the normal images of
    `sampler_gaussian`."""
    signal = first.exp() / (1 + first.exp())
    alphas = [signal, *(1 - Decimal(level) for level in LEVELS[1:])]
    sigmas = [1 - signal, *map(Decimal, LEVELS[1:])]
    lambdas = [(alpha / sigma).ln() if sigma else None for alpha, sigma in zip(alphas, sigmas, strict=True)]
    images: list[Decimal] = []
    before = x
    for i, (alpha, sigma) in enumerate(zip(alphas[:-1], sigmas[:-1], strict=True)):
        gain = alpha * Decimal(VARIANCE) / (alpha * alpha * Decimal(VARIANCE) + sigma * sigma)
        image = gain * x + (1 - gain * alpha) * Decimal(MEAN)
        if i:
            x = _corrected(before, alphas, sigmas, lambdas, [*images, image])
        images.append(image)
        before = x
        x = _predicted(x, alphas, sigmas, lambdas, images)
    return x


def _predicted(x, alphas, sigmas, lambdas, images):
    i = len(images) - 1
    if not sigmas[i + 1]:
        return images[i]
    h = lambdas[i + 1] - lambdas[i]
    moved = sigmas[i + 1] / sigmas[i] * x - alphas[i + 1] * ((-h).exp() - 1) * images[i]
    if i == 0 or i == len(sigmas) - 2:
        return moved
    ratio = (lambdas[i - 1] - lambdas[i]) / h
    return moved - alphas[i + 1] * ((-h).exp() - 1) * (images[i - 1] - images[i]) / ratio / 2


def _corrected(x, alphas, sigmas, lambdas, images):
    i = len(images) - 2  # the step's start; its end has an image too
    h = lambdas[i + 1] - lambdas[i]
    growth = (-h).exp() - 1
    moved = sigmas[i + 1] / sigmas[i] * x - alphas[i + 1] * growth * images[i]
    change = images[i + 1] - images[i]
    if i == 0:
        return moved - alphas[i + 1] * growth * change / 2
    ratio = (lambdas[i - 1] - lambdas[i]) / h
    phi = growth / -h - 1
    moments = phi / growth, (phi / -h - Decimal("0.5")) * 2 / growth
    older = (moments[1] - moments[0]) / (ratio - 1)  # of the two equations that both moments give
    slopes = older * (images[i - 1] - images[i]) / ratio + (moments[0] - older) * change
    return moved - alphas[i + 1] * growth * slopes


def test_it_is_the_limit_of_the_published_formula() -> None:
    """The difference falls as 1 / lambda does; diffusers begins at 1 - 1e-6, where lambda is -13.8."""
    grid = Schedule(sigmas=LEVELS, flow=True)
    found = run(UNIPC, np.array(STARTS), grid, None)[-1]
    differences = []
    with decimal.localcontext(prec=80):
        for first in ("-13.8", "-1e2", "-1e3", "-1e4", "-1e5"):
            expected = [float(published(Decimal(x), Decimal(first))) for x in STARTS]
            differences.append(float(np.abs(found - expected).max()))
            print(f"from lambda {first}: {differences[-1]:.1e}")
    assert all(later < before / 5 for before, later in pairwise(differences))
    assert differences[0] < 1e-3 and differences[-1] < 1e-7


def test_the_first_step_has_second_order() -> None:
    """Half the step divides the error of one step by 8; without the correction by 4."""
    corrected, predicted = [], []
    for size in (0.2, 0.1, 0.05, 0.025):
        end = 1 - size
        grid = Schedule(sigmas=(1.0, end, end - 1e-9), flow=True)
        first, second = run(UNIPC, np.array(STARTS), grid, None)
        exact = exact_ode(np.array(STARTS), grid, 1.0, end)
        predicted.append(float(np.abs(first - exact).max()))
        corrected.append(float(np.abs(second - exact).max()))
    orders = [[math.log2(one / other) for one, other in pairwise(errors)] for errors in (predicted, corrected)]
    print(f"errors {corrected}, orders {orders[1]}; predicted alone {predicted}, {orders[0]}")
    assert all(1.7 < order < 2.3 for order in orders[0]) and all(order > 2.7 for order in orders[1])
    assert corrected[0] < predicted[0] / 5


@pytest.mark.parametrize(("steps", "limit"), [(4, 2e-3), (8, 1e-3), (20, 1e-4)])
def test_diffusers_is_near(steps: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
    reference = scheduler("unipc_multistep", "UniPCMultistepScheduler", **config)
    sigmas = 3 * np.linspace(1, 1 / steps, steps) / (1 + 2 * np.linspace(1, 1 / steps, steps))
    set_timesteps = reference.set_timesteps
    monkeypatch.setattr(
        reference, "set_timesteps", lambda count: set_timesteps(sigmas=np.linspace(1, 1 / count, count))
    )
    expected, _ = run_theirs(
        reference, steps, next(noises(5)), noises(9), monkeypatch, model=lambda x, time: network(x, 0.0)
    )
    grid = Schedule(sigmas=(*map(float, sigmas), 0.0), flow=True)
    *_, found = unchanged(UNIPC.function(next(noises(5)), grid, lambda x, s: x - s * network(x, 0.0), None))
    print(f"{steps} steps: {relative(found, expected):.1e}; their first level {float(reference.sigmas[0]):.7f}")
    assert relative(found, expected) < limit
