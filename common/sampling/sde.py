"""Samplers that add fresh noise in every step.

The noise of each step is independent of the others', so independent draws are the increments of one Brownian path.
Where a step has a point in its middle, each half has its own draw, and the noise of the whole step is composed of both
with the weights that the SDE gives them: again one path, without a tree of bridges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qwenimg.common.sampling.ode import ddim, midpoint
from qwenimg.common.sampling.steps import ancestral, diffused, gain, growth, halfway, renoised, toward
from qwenimg.common.sampling.types import Array, DenoiseFunction, Noise, Schedule, States

# Levels between which SA-Solver is stochastic: of Stable Diffusion, timesteps 200 to 800; of flow models, that share
SA_LEVELS = (0.5705, 5.12)
SA_LEVELS_FLOW = (0.2, 0.8)


def ddpm(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with ancestral steps of the smaller of the two variances (J. Ho et al., "Denoising Diffusion
    Probabilistic Models", 2020)."""
    return ddim(x, schedule, denoise, noise, eta=1.0)


def euler_ancestral(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with Euler steps below the next level, then noise up to it (K. Crowson, "k-diffusion", 2022); for flow
    models in the rectified-flow form."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next)
        x = renoised(toward(x, denoise(x, sigma), sigma, down), scale, up, noise)
        x = yield x


def dpm2_ancestral(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM2 below the next level, then noise up to it (K. Crowson, 2022)."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next)
        x = renoised(midpoint(x, denoise, sigma, down), scale, up, noise)
        x = yield x


def dpmpp_2s_ancestral(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver++(2S) (C. Lu et al., 2022) below the next level, then noise up to it (K. Crowson,
    2022)."""
    for sigma, sigma_next in schedule.pairs():
        down, scale, up = ancestral(schedule, sigma, sigma_next)
        denoised = denoise(x, sigma)
        if down > 0 and math.isfinite(growth(schedule, sigma, down)):
            middle = halfway(schedule, sigma, down)
            denoised = denoise(toward(x, denoised, sigma, middle), middle)
        x = renoised(toward(x, denoised, sigma, down), scale, up, noise)
        x = yield x


def dpmpp_sde(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with DPM-Solver++ for the SDE, with a point in the middle of each step (C. Lu et al., 2022; K. Crowson,
    2022)."""
    for sigma, sigma_next in schedule.pairs():
        denoised = denoise(x, sigma)
        if sigma_next == 0 or math.isinf(growth(schedule, sigma, sigma_next)):
            x = _sde_step(x, denoised, schedule, sigma, sigma_next, noise)
            x = yield x
            continue
        middle = halfway(schedule, sigma, sigma_next)
        first = noise()
        keep, take, fresh = diffused(schedule, sigma, middle)
        denoised = denoise(keep * x + take * denoised + fresh * first, middle)
        carried, _, late = diffused(schedule, middle, sigma_next)
        keep, take, _ = diffused(schedule, sigma, sigma_next)
        x = keep * x + take * denoised + (carried * fresh) * first + late * noise()
        x = yield x


def _sde_step(x: Array, denoised: Array, schedule: Schedule, sigma: float, sigma_next: float, noise: Noise) -> Array:
    if sigma_next == 0:
        return denoised
    keep, take, fresh = diffused(schedule, sigma, sigma_next)
    return keep * x + take * denoised + fresh * noise()


def dpmpp_2m_sde(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with SDE-DPM-Solver++(2M), the midpoint form (C. Lu et al., 2022)."""
    return _multistep_sde(x, schedule, denoise, noise, lambda h: 0.5 * gain(h))


def dpmpp_2m_sde_heun(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with SDE-DPM-Solver++(2M) with `denoised` on a line in lambda, integrated exactly (K. Crowson, 2023)."""
    return _multistep_sde(x, schedule, denoise, noise, _line)


def _line(h: float) -> float:
    return 1.0 - gain(h) / (2.0 * h)


def _multistep_sde(
    x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise, weight: Callable[[float], float]
) -> States:
    previous, last = None, 0.0
    for sigma, sigma_next in schedule.pairs():
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        moved = _sde_step(x, denoised, schedule, sigma, sigma_next, noise)
        if previous is not None and 0 < sigma_next < sigma:
            moved = moved + (schedule.alpha(sigma_next) * weight(h) * h / last) * (denoised - previous)
        x, previous, last = moved, denoised, h
        x = yield x


def dpmpp_3m_sde(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with SDE-DPM-Solver++(3M): `denoised` on a parabola in lambda (K. Crowson, "k-diffusion", 2023, after C.
    Lu et al.).

    The parabola's square term has half the weight of the exact integral, as published: the method's order is 2.
    """
    old_denoised: list[Array] = []  # `denoised` of the two steps before, the newest first
    steps: list[float] = []
    for sigma, sigma_next in schedule.pairs():
        denoised, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        x = _sde_step(x, denoised, schedule, sigma, sigma_next, noise)
        if old_denoised and 0 < sigma_next < sigma:
            for weight, older, newer in zip(_parabola(h, steps), old_denoised, [denoised, *old_denoised], strict=False):
                x = x + (schedule.alpha(sigma_next) * weight) * (newer - older)
        old_denoised, steps = [denoised, *old_denoised[:1]], [h, *steps[:1]]
        x = yield x


def _parabola(h: float, steps: Sequence[float]) -> list[float]:
    """Return the weights of the two newest differences of `denoised`, the newest first."""
    phi_2 = _line(h)
    if len(steps) == 1 or math.isinf(sum(steps)):
        return [phi_2 * h / steps[0], 0.0][: len(steps)]
    phi_3 = 0.5 - phi_2 / (2.0 * h)
    near, far = steps[0] / h, steps[1] / h
    bend = (phi_2 * near + phi_3) / (near + far)
    return [(phi_2 + bend) / near, -bend / far]


def sa_solver(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample with SA-Solver, a two-step predictor and a corrector for the SDE whose noise tau is 1 at middle levels
    and else 0 (S. Xue et al., "SA-Solver: Stochastic Adams Solver for Fast Sampling of Diffusion Models", 2023)."""
    low, high = SA_LEVELS_FLOW if schedule.flow else SA_LEVELS
    denoised, last = None, 0.0  # `denoised` and h of the step before
    base, size = x, 0.0  # that step's sum without differences, and the weight of a difference of `denoised`
    for i, (sigma, sigma_next) in enumerate(schedule.pairs()):
        now, h = denoise(x, sigma), growth(schedule, sigma, sigma_next)
        if denoised is not None and math.isfinite(last):
            x = base + size * (now - denoised)
        tau = 1.0 if low <= sigma <= high else 0.0
        keep, take, fresh = diffused(schedule, sigma, sigma_next, tau)
        base = now if sigma_next == 0 else keep * x + take * now
        if sigma_next > 0:  # a draw in each step, used or not, as in the authors' program
            base = base + fresh * noise()
        size = schedule.alpha(sigma_next) * (1.0 + tau * tau) * h / 2.0
        x = base
        if denoised is not None and i < len(schedule.sigmas) - 2:  # the last step is one of first order
            x = x + (size * h / last) * (now - denoised)
        denoised, last = now, h
        x = yield x


def lcm(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample by multistep consistency sampling: `denoised`, noised again (S. Luo et al., "Latent Consistency Models",
    2023).

    The weight of x itself in the consistency function, below 1e-5 on the levels of these models, is left out.
    """
    for sigma, sigma_next in schedule.pairs():
        denoised = denoise(x, sigma)
        x = denoised if sigma_next == 0 else schedule.alpha(sigma_next) * denoised + sigma_next * noise()
        x = yield x


def tcd(x: Array, schedule: Schedule, denoise: DenoiseFunction, noise: Noise) -> States:
    """Sample by strategic stochastic sampling with gamma 0.3: a jump below the next level, to a level of the
    schedule, then noise up to it (J. Zheng et al., "Trajectory Consistency Distillation", 2024)."""
    for (sigma, sigma_next), down in zip(schedule.pairs(), schedule.between, strict=True):
        x = toward(x, denoise(x, sigma), sigma, down)
        if down < sigma_next:
            x = x + math.sqrt(sigma_next * sigma_next - down * down) * noise()
        x = yield x
