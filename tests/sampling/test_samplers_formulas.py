"""Samplers against their published formulas, written here a second time and in float64, and flow forms against
diffusers. The model is a made-up function that is not linear."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from support.sampler_reference import SHAPE, network, noises, relative, run, scheduler

from qwenimg.common.sampling.adaptive import _ATOL, _RTOL
from qwenimg.common.sampling.steps import unchanged
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.common.sampling.types import Schedule

EXACT = 1e-12  # both sides in float64
FLOAT32 = 3e-5  # diffusers' levels and steps
SIGMAS = (14.6, 9.1, 5.5, 3.2, 1.9, 1.0, 0.55, 0.24, 0.08, 0.0)
FLOW_SIGMAS = (1.0, 0.93, 0.81, 0.66, 0.45, 0.21, 0.07, 0.0)


def guided(x: np.ndarray, sigma: float) -> np.ndarray:
    return 0.7 * np.tanh(network(x, 40 * math.log(1 + sigma)))


def unguided(x: np.ndarray, sigma: float) -> np.ndarray:
    return guided(x, sigma) + 0.2 * np.cos(x)


class Denoiser:
    def __call__(self, x, sigma):
        return guided(x, sigma)

    def both(self, x, sigma):
        return guided(x, sigma), unguided(x, sigma)


def ours(name: str, x: np.ndarray, sigmas=SIGMAS, *, flow: bool = False) -> np.ndarray:
    draws = noises(9)
    more = (lambda array: array,) if SAMPLERS[name].adaptive else ()
    grid = Schedule(sigmas=tuple(sigmas), flow=flow)
    *_, found = unchanged(SAMPLERS[name].function(x, grid, Denoiser(), lambda: next(draws), *more))
    return found


def check(name: str, expected: np.ndarray, found: np.ndarray, limit: float = EXACT) -> None:
    print(f"{name}: {relative(found, expected):.1e}")
    assert found.shape == SHAPE and relative(found, expected) < limit


def start() -> np.ndarray:
    return SIGMAS[0] * next(noises(5))


def slope(x, sigma, image=None):
    return (x - (guided(x, sigma) if image is None else image)) / sigma


def test_heunpp2():
    x = start()
    for i, (s, t) in enumerate(pairwise(SIGMAS)):
        d, dt = slope(x, s), t - s
        if i == len(SIGMAS) - 2:
            x = x + d * dt
            continue
        x2 = x + d * dt
        d2 = slope(x2, t)
        if i == len(SIGMAS) - 3:
            w2 = t / (2 * SIGMAS[0])
            x = x + ((1 - w2) * d + w2 * d2) * dt
            continue
        u = SIGMAS[i + 2]
        d3 = slope(x2 + d2 * (u - t), u)
        w2, w3 = t / (3 * SIGMAS[0]), u / (3 * SIGMAS[0])
        x = x + ((1 - w2 - w3) * d + w2 * d2 + w3 * d3) * dt
    check("heunpp2", x, ours("heunpp2", start()))


def up_and_down(s, t):
    up = min(t, math.sqrt(t**2 * (s**2 - t**2) / s**2))
    return up, math.sqrt(t**2 - up**2)


def test_dpmpp_2s_ancestral():
    x, draws = start(), noises(9)
    for s, t in pairwise(SIGMAS):
        up, down = up_and_down(s, t)
        if down == 0:
            x = x + slope(x, s) * (down - s)
        else:
            h = math.log(s) - math.log(down)
            middle = math.exp(math.log(s) - h / 2)
            x2 = middle / s * x - math.expm1(-h / 2) * guided(x, s)
            x = down / s * x - math.expm1(-h) * guided(x2, middle)
        if t > 0:
            x = x + up * next(draws)
    check("dpmpp_2s_ancestral", x, ours("dpmpp_2s_ancestral", start()))


def test_ipndm():
    x, old = start(), []
    table = {1: [1], 2: [3 / 2, -1 / 2], 3: [23 / 12, -16 / 12, 5 / 12], 4: [55 / 24, -59 / 24, 37 / 24, -9 / 24]}
    for s, t in pairwise(SIGMAS):
        old = [slope(x, s), *old][:4]
        x = guided(x, s) if t == 0 else x + (t - s) * sum(c * d for c, d in zip(table[len(old)], old, strict=True))
    check("ipndm", x, ours("ipndm", start()))


def test_ipndm_v():
    """The weights as the authors print them, by ratios of steps, up to order 3, and order 4 by solving for them."""
    x, old = start(), []
    for i, (s, t) in enumerate(pairwise(SIGMAS)):
        old = [slope(x, s), *old][:4]
        h = t - s
        h1, h2 = (SIGMAS[i - j] - SIGMAS[i - j - 1] if i > j else 0.0 for j in (0, 1))
        if t == 0:
            x = guided(x, s)
            break
        if len(old) == 1:
            weights = [1.0]
        elif len(old) == 2:
            weights = [(2 + h / h1) / 2, -(h / h1) / 2]
        elif len(old) == 3:
            bend = (1 - h / (3 * (h + h1))) * (h * (h + h1)) / (h1 * (h1 + h2)) / 2
            weights = [(2 + h / h1) / 2 + bend, -(h / h1) / 2 - (1 + h1 / h2) * bend, bend * h1 / h2]
        else:
            nodes = np.array(SIGMAS[i - 3 : i + 1][::-1]) - s
            exact = [h ** (p + 1) / (p + 1) / h for p in range(4)]
            weights = np.linalg.solve(np.vander(nodes, 4, increasing=True).T, exact)
        x = x + h * sum(w * d for w, d in zip(weights, old, strict=True))
    check("ipndm_v", x, ours("ipndm_v", start()), 1e-11)  # the system is solved in float64


def test_res_multistep():
    x, old = start(), None
    for i, (s, t) in enumerate(pairwise(SIGMAS)):
        image = guided(x, s)
        if t == 0 or old is None:
            x = x + (x - image) / s * (t - s)
        else:
            h = math.log(s) - math.log(t)
            c2 = (math.log(s) - math.log(SIGMAS[i - 1])) / h
            phi1 = math.expm1(-h) / -h
            phi2 = (phi1 - 1) / -h
            x = math.exp(-h) * x + h * ((phi1 - phi2 / c2) * image + phi2 / c2 * old)
        old = image
    check("res_multistep", x, ours("res_multistep", start()))


# DPM-Solver's steps in t = -log sigma, with eps the noise.


def noise_of(x, t):
    return (x - guided(x, math.exp(-t))) / math.exp(-t)


def dpm_1(x, t, u):
    return x - math.exp(-u) * math.expm1(u - t) * noise_of(x, t)


def dpm_2(x, t, u, r=1 / 2):
    h, eps = u - t, noise_of(x, t)
    s = t + r * h
    u1 = x - math.exp(-s) * math.expm1(r * h) * eps
    return x - math.exp(-u) * math.expm1(h) * eps - math.exp(-u) / (2 * r) * math.expm1(h) * (noise_of(u1, s) - eps)


def dpm_3(x, t, u, r1=1 / 3, r2=2 / 3):
    h, eps = u - t, noise_of(x, t)
    s1, s2 = t + r1 * h, t + r2 * h
    u1 = x - math.exp(-s1) * math.expm1(r1 * h) * eps
    change = noise_of(u1, s1) - eps
    u2 = x - math.exp(-s2) * math.expm1(r2 * h) * eps
    u2 = u2 - math.exp(-s2) * (r2 / r1) * (math.expm1(r2 * h) / (r2 * h) - 1) * change
    x3 = x - math.exp(-u) * math.expm1(h) * eps
    return x3 - math.exp(-u) / r2 * (math.expm1(h) / h - 1) * (noise_of(u2, s2) - eps)


@pytest.mark.parametrize(
    ("evaluations", "orders"), [(9, [3, 3, 2, 1]), (10, [3, 3, 3, 1]), (8, [3, 3, 2]), (2, [2]), (3, [2, 1])]
)
def test_dpm_fast(evaluations, orders):
    sigmas = np.geomspace(14.6, 0.03, evaluations + 1)
    x, times = start(), np.linspace(-math.log(14.6), -math.log(0.03), len(orders) + 1)
    for order, (t, u) in zip(orders, pairwise(times), strict=True):
        x = {1: dpm_1, 2: dpm_2, 3: dpm_3}[order](x, t, u)
    check(f"dpm_fast, {evaluations}", x, ours("dpm_fast", start(), sigmas), 1e-11)
    to_zero = ours("dpm_fast", start(), (*sigmas, 0.0))
    check("dpm_fast to 0", guided(x, sigmas[-1]), to_zero, 1e-10)


def test_dpm_adaptive(monkeypatch):
    def jumping(x, sigma):  # or no step would be refused
        return np.tanh(x) + (4.0 if sigma < 1 else -4.0)

    monkeypatch.setitem(globals(), "guided", jumping)
    x = previous = start()
    t, end, h, taken, refused = -math.log(SIGMAS[0]), -math.log(0.03), 0.05, 0, 0
    while t < end - 1e-5:
        u = min(end, t + h)
        low, high = dpm_2(x, t, u, r=1 / 3), dpm_3(x, t, u)
        delta = np.maximum(_ATOL, _RTOL * np.maximum(np.abs(low), np.abs(previous)))
        error = np.linalg.norm(((low - high) / delta).ravel()) / math.sqrt(x.size)
        factor = 1 + math.atan((1 / (1e-8 + error)) ** (1 / 3) - 1)
        if factor >= 0.81:
            previous, x, t, taken = low, high, u, taken + 1
        else:
            refused += 1
        h *= factor
    print(f"{taken} steps taken, {refused} refused")
    assert refused > 0  # or the controller would not be tested
    check("dpm_adaptive", x, ours("dpm_adaptive", start(), (SIGMAS[0], 1.0, 0.03)), 1e-10)


def test_euler_cfgpp():
    x = start()
    for s, t in pairwise(SIGMAS):
        x = guided(x, s) + t * (x - unguided(x, s)) / s
    check("euler_cfgpp", x, ours("euler_cfgpp", start()))


def test_euler_ancestral_cfgpp():
    x, draws = start(), noises(9)
    for s, t in pairwise(SIGMAS):
        up, down = up_and_down(s, t)
        x = guided(x, s) + down * (x - unguided(x, s)) / s
        if t > 0:
            x = x + up * next(draws)
    check("euler_ancestral_cfgpp", x, ours("euler_ancestral_cfgpp", start()))


def test_dpmpp_2s_ancestral_cfgpp():
    x, draws = start(), noises(9)
    for s, t in pairwise(SIGMAS):
        up, down = up_and_down(s, t)
        g, u = guided(x, s), unguided(x, s)
        if down == 0:
            x = g
        else:
            h = math.log(s) - math.log(down)
            middle = math.exp(math.log(s) - h / 2)
            x2 = middle / s * (x + (g - u)) - math.expm1(-h / 2) * g
            x = down / s * (x + (g - u)) - math.expm1(-h) * guided(x2, middle)
        if t > 0:
            x = x + up * next(draws)
    check("dpmpp_2s_ancestral_cfgpp", x, ours("dpmpp_2s_ancestral_cfgpp", start()))


def test_dpmpp_2m_cfgpp():
    x, old = start(), None
    for i, (s, t) in enumerate(pairwise(SIGMAS)):
        g, u = guided(x, s), unguided(x, s)
        if t == 0:
            x = g
            break
        h = math.log(s) - math.log(t)
        mix = -math.exp(-h) * u
        if old is not None:
            r = (math.log(SIGMAS[i - 1]) - math.log(s)) / h
            mix = mix - math.expm1(-h) / (2 * r) * (g - old)
        x, old = g + mix + math.exp(-h) * x, u
    check("dpmpp_2m_cfgpp", x, ours("dpmpp_2m_cfgpp", start()))


@pytest.mark.parametrize("flow", [False, True])
def test_cfgpp_without_guidance_is_the_plain_sampler(flow, monkeypatch):
    monkeypatch.setattr(Denoiser, "both", lambda self, x, sigma: (guided(x, sigma), guided(x, sigma)))
    sigmas = FLOW_SIGMAS if flow else SIGMAS
    for name in ("euler", "euler_ancestral", "dpmpp_2s_ancestral"):
        check(name, ours(name, start(), sigmas, flow=flow), ours(f"{name}_cfgpp", start(), sigmas, flow=flow))
    long = (*np.geomspace(sigmas[0], 0.05, 16), 0.0)  # 2M's last step of few is of first order
    check("dpmpp_2m", ours("dpmpp_2m", start(), long, flow=flow), ours("dpmpp_2m_cfgpp", start(), long, flow=flow))


# Flow forms.


@pytest.mark.parametrize("name", [name for name, sampler in SAMPLERS.items() if sampler.flow])
def test_flow_samplers_start_from_pure_noise(name):
    """At sigma = 1 lambda is infinite; the result is the limit of starts a little below, where that exists.

    DPM-Solver++ SDE asks in the middle of its first step, which is infinite: it takes one without a middle. DEIS comes
    near only as 1 / log does.
    """
    limit = 0.1 if name in ("dpmpp_sde", "deis") else 1e-3
    x, below = next(noises(5)), (1 - 1e-7, *FLOW_SIGMAS[1:])
    found, near = ours(name, x, FLOW_SIGMAS, flow=True), ours(name, x, below, flow=True)
    print(f"{name}: {relative(found, near):.1e}")
    assert np.isfinite(found).all() and relative(found, near) < limit


FLOW = {
    "euler_ancestral": ("ltx_euler_ancestral_rf", "LTXEulerAncestralRFScheduler", {}),
    "heun": ("flow_match_heun_discrete", "FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
    "lcm": ("flow_match_lcm", "FlowMatchLCMScheduler", {"shift": 3.0}),
    "dpmpp_2m": ("dpmsolver_multistep", "DPMSolverMultistepScheduler", {}),
    "dpmpp_2m_sde": ("dpmsolver_multistep", "DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "unipc": ("unipc_multistep", "UniPCMultistepScheduler", {}),
    "deis": ("deis_multistep", "DEISMultistepScheduler", {}),
    "sa_solver": ("sasolver", "SASolverScheduler", {}),
}


@pytest.mark.parametrize("name", FLOW)
@pytest.mark.sample(2)
def test_flow_forms_equal_diffusers(name, monkeypatch):
    module, cls, config = FLOW[name]
    if "flow" not in module and "ltx" not in module:
        config = {**config, "use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}

    def velocity(x, time):
        return network(x, 0.0)

    if name == "sa_solver":  # by whole timesteps, of which the levels are a little above
        config["tau_func"] = lambda time: float(200 <= time < 800)
    reference, draws = scheduler(module, cls, **config), noises(9)
    expected, _ = run(reference, 20, next(noises(5)), noises(9), monkeypatch, model=velocity)
    sigmas = [float(sigma) for sigma in reference.sigmas]
    if name == "heun":  # which has them twice
        sigmas = list(dict.fromkeys(sigmas))

    class Flow:
        def __call__(self, x, sigma):
            return x - sigma * velocity(x, 0.0)

    grid = Schedule(sigmas=tuple(sigmas), flow=True)
    *_, found = unchanged(SAMPLERS[name].function(next(noises(5)), grid, Flow(), lambda: next(draws)))
    check(name, expected, found, FLOAT32)
