"""Samplers that add fresh noise in every step.

A step's noise depends on no other's, so independent draws are the increments of one Brownian path. Where a step has a
point in its middle, two draws are made, one for each half, and the whole step's noise is composed of both with the
weights that the SDE gives them: again one path, without a tree of bridges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from qwenimg.common.sampling.ode import ddim, midpoint
from qwenimg.common.sampling.steps import ancestral, diffused, gain, growth, halfway, renoised, toward
from qwenimg.common.sampling.types import Array, Denoiser, Grid, Noise

# Where SA-Solver is stochastic: timesteps 200 to 800 of Stable Diffusion's betas, and the same share of a flow.
SA_LEVELS = (0.5705, 5.12)
SA_LEVELS_FLOW = (0.2, 0.8)


def ddpm(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Ancestral sampling with the smaller of the two variances (J. Ho et al., "Denoising Diffusion Probabilistic
    Models", 2020)."""
    return ddim(x, grid, denoise, noise, eta=1.0)


def euler_ancestral(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """An Euler step below the next level, then noise up to it (K. Crowson, "k-diffusion", 2022); for flow models in
    the rectified-flow form."""
    for sigma, after in grid.pairs():
        down, scale, up = ancestral(grid, sigma, after)
        x = renoised(toward(x, denoise(x, sigma), sigma, down), scale, up, noise)
        yield x


def dpm2_ancestral(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """DPM2 below the next level, then noise up to it (K. Crowson, 2022)."""
    for sigma, after in grid.pairs():
        down, scale, up = ancestral(grid, sigma, after)
        x = renoised(midpoint(x, denoise, sigma, down), scale, up, noise)
        yield x


def dpmpp_2s_ancestral(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """DPM-Solver++(2S) (C. Lu et al., 2022) below the next level, then noise up to it (K. Crowson, 2022)."""
    for sigma, after in grid.pairs():
        down, scale, up = ancestral(grid, sigma, after)
        image = denoise(x, sigma)
        if down > 0 and math.isfinite(growth(grid, sigma, down)):
            middle = halfway(grid, sigma, down)
            image = denoise(toward(x, image, sigma, middle), middle)
        x = renoised(toward(x, image, sigma, down), scale, up, noise)
        yield x


def dpmpp_sde(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """DPM-Solver++ for the SDE with a point in the middle of each step (C. Lu et al., 2022; K. Crowson, 2022)."""
    for sigma, after in grid.pairs():
        image = denoise(x, sigma)
        if after == 0 or math.isinf(growth(grid, sigma, after)):
            x = _sde_step(x, image, grid, sigma, after, noise)
            yield x
            continue
        middle = halfway(grid, sigma, after)
        first = noise()
        kept, taken, added = diffused(grid, sigma, middle)
        image = denoise(kept * x + taken * image + added * first, middle)
        carried, _, late = diffused(grid, middle, after)
        kept, taken, _ = diffused(grid, sigma, after)
        x = kept * x + taken * image + (carried * added) * first + late * noise()
        yield x


def _sde_step(x: Array, image: Array, grid: Grid, sigma: float, after: float, noise: Noise) -> Array:
    if after == 0:
        return image
    kept, taken, added = diffused(grid, sigma, after)
    return kept * x + taken * image + added * noise()


def dpmpp_2m_sde(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """SDE-DPM-Solver++(2M), the midpoint form (C. Lu et al., 2022)."""
    return _multistep_sde(x, grid, denoise, noise, _middle)


def dpmpp_2m_sde_heun(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """SDE-DPM-Solver++(2M) with the image on a line in lambda, integrated exactly (K. Crowson, 2023)."""
    return _multistep_sde(x, grid, denoise, noise, _line)


def _middle(h: float) -> float:
    return 0.5 * gain(h)


def _line(h: float) -> float:
    return 1.0 - gain(h) / (2.0 * h)


def _multistep_sde(
    x: Array, grid: Grid, denoise: Denoiser, noise: Noise, weight: Callable[[float], float]
) -> Iterator[Array]:
    previous, last = None, 0.0
    for sigma, after in grid.pairs():
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        moved = _sde_step(x, image, grid, sigma, after, noise)
        if previous is not None and 0 < after < sigma:
            moved = moved + (grid.alpha(after) * weight(h) * h / last) * (image - previous)
        x, previous, last = moved, image, h
        yield x


def dpmpp_3m_sde(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """SDE-DPM-Solver++(3M): the image on a parabola in lambda (K. Crowson, "k-diffusion", 2023, after C. Lu et al.).

    The parabola's square term has half the weight that the exact integral gives, as published: its order is 2.
    """
    images: list[Array] = []  # of the two steps before, the newest first
    steps: list[float] = []
    for sigma, after in grid.pairs():
        image, h = denoise(x, sigma), growth(grid, sigma, after)
        x = _sde_step(x, image, grid, sigma, after, noise)
        if images and 0 < after < sigma:
            for weight, older, newer in zip(_parabola(h, steps), images, [image, *images], strict=False):
                x = x + (grid.alpha(after) * weight) * (newer - older)
        images, steps = [image, *images[:1]], [h, *steps[:1]]
        yield x


def _parabola(h: float, steps: Sequence[float]) -> list[float]:
    """Weights of the newest difference of images and of the one before it."""
    phi_2 = _line(h)
    if len(steps) == 1 or math.isinf(sum(steps)):
        return [phi_2 * h / steps[0], 0.0][: len(steps)]
    phi_3 = 0.5 - phi_2 / (2.0 * h)
    near, far = steps[0] / h, steps[1] / h
    bend = (phi_2 * near + phi_3) / (near + far)
    return [(phi_2 + bend) / near, -bend / far]


def sa_solver(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """SA-Solver, a two-step predictor and a corrector for the SDE whose noise tau is 1 at middle levels and else 0
    (S. Xue et al., "SA-Solver: Stochastic Adams Solver for Fast Sampling of Diffusion Models", 2023)."""
    low, high = SA_LEVELS_FLOW if grid.flow else SA_LEVELS
    image, last = None, 0.0  # of the step before
    base, size = x, 0.0  # what that step added up without the images, and what a difference of images weighs in it
    for i, (sigma, after) in enumerate(grid.pairs()):
        now, h = denoise(x, sigma), growth(grid, sigma, after)
        if image is not None and math.isfinite(last):
            x = base + size * (now - image)
        tau = 1.0 if low <= sigma <= high else 0.0
        kept, taken, added = diffused(grid, sigma, after, tau)
        base = now if after == 0 else kept * x + taken * now
        if after > 0:  # a draw in each step, whether it is used or not, as the authors' program does
            base = base + added * noise()
        size = grid.alpha(after) * (1.0 + tau * tau) * h / 2.0
        x = base
        if image is not None and i < len(grid.sigmas) - 2:  # the last step is one of first order
            x = x + (size * h / last) * (now - image)
        image, last = now, h
        yield x


def lcm(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Multistep consistency sampling: the image, noised anew (S. Luo et al., "Latent Consistency Models", 2023).

    The weight of x itself in the consistency function, below 1e-5 on the levels of these models, is left out.
    """
    for sigma, after in grid.pairs():
        image = denoise(x, sigma)
        x = image if after == 0 else grid.alpha(after) * image + after * noise()
        yield x


def tcd(x: Array, grid: Grid, denoise: Denoiser, noise: Noise) -> Iterator[Array]:
    """Strategic stochastic sampling with gamma 0.3: a jump below the next level, which the grid gives, then noise up
    to it (J. Zheng et al., "Trajectory Consistency Distillation", 2024)."""
    for (sigma, after), down in zip(grid.pairs(), grid.between, strict=True):
        x = toward(x, denoise(x, sigma), sigma, down)
        if down < after:
            x = x + math.sqrt(after * after - down * down) * noise()
        yield x
