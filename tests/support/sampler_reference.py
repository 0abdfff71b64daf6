"""diffusers' schedulers as references for samplers, with their known defects worked around in this one place.

- Two of them import scipy or torchsde, which the project does without: of scipy a quadrature is given, of torchsde
  nothing, since the noise is given too.
- DDIM and PNDM go from t to t - T // steps, whatever the spacing: with "linspace", or "trailing" and steps that do
  not divide T, that is not where the model is asked next. Only grids on which both agree are compared.
- PNDM combines the model's outputs; of a v-model those are velocities at several times, turned into noise at the
  newest. Its paper combines noise: a v-model's outputs are turned into noise before they are given to it.
- PNDM's Runge-Kutta start with an odd step moves half a step plus 1/2 and asks half a step minus 1/2: even steps only.
- SDE-DPM-Solver++ of order 3 has a wrong sign in its last term, see `correct_third_order`, and lowers its order in
  the last steps of few. It starts as k-diffusion does only with `solver_type` "heun".
- All draw from `randn_tensor`, which is replaced, but DPM++ SDE, which draws from a Brownian tree.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator

import numpy as np
import torch

from qwenimg.common.sampling.discrete import DiffusionConfig, clock, scalings
from qwenimg.common.sampling.types import Schedule

SHAPE = (1, 3, 5, 7)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}


def noises(seed: int = 1) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    while True:
        yield generator.standard_normal(SHAPE)


def network(inputs: np.ndarray, time: float) -> np.ndarray:
    """A made-up model: smooth, not linear, different at every time and for every element."""
    weights = np.linspace(0.2, 1.1, inputs.size).reshape(inputs.shape)
    mixed = np.roll(inputs, 1, axis=-1)
    return np.tanh(weights * inputs + 0.3 * mixed + np.cos(time / 130.0)) + 0.1 * inputs


class Denoiser:
    """The network as our samplers see it; remembers at which times it was asked."""

    def __init__(self, config: DiffusionConfig, grid: Schedule):
        self.prediction, self.time = config.prediction_type, clock(config.levels, grid)
        self.times: list[float] = []

    def __call__(self, x: np.ndarray, sigma: float) -> np.ndarray:
        c_in, c_skip, c_out = scalings(self.prediction, sigma)
        self.times.append(self.time(sigma))
        return c_skip * x + c_out * network(c_in * x, self.times[-1])


def _quad(function: Callable[[float], float], start: float, end: float, **_: object) -> tuple[float, float]:
    points, weights = np.polynomial.legendre.leggauss(20)
    middle, half = (start + end) / 2, (end - start) / 2
    return half * sum(w * function(middle + half * p) for p, w in zip(points, weights, strict=True)), 0.0


def scheduler(module: str, name: str, **config: object):
    """A scheduler of diffusers, which looks for scipy when it is imported, and for torchsde as well."""
    import diffusers.schedulers.scheduling_utils  # noqa: F401  (before there is anything by the name of torchsde)

    sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))
    try:
        found = importlib.import_module(f"diffusers.schedulers.scheduling_{module}")
    finally:
        if not getattr(sys.modules["torchsde"], "__file__", None):
            del sys.modules["torchsde"]
    if module == "lms_discrete" and not hasattr(found, "integrate"):
        found.integrate = types.SimpleNamespace(quad=_quad)
    made = getattr(found, name)
    set_timesteps = made.set_timesteps
    made.set_timesteps = _unset  # some set all trained times when they are made, which takes seconds
    try:
        return made(**config)
    finally:
        made.set_timesteps = set_timesteps


def _unset(reference, *_: object) -> None:
    reference.sigmas = torch.zeros(1)


def correct_third_order(reference) -> None:
    """SDE-DPM-Solver++(3M) with the sign that its last term has in the paper (as without noise, with 2 h for h): the
    second difference of the images then weighs nothing in a step of no length."""
    update = reference.multistep_dpm_solver_third_order_update

    def corrected(outputs, *, sample, noise):
        levels = [reference._sigma_to_alpha_sigma_t(reference.sigmas[reference.step_index + i]) for i in (1, 0, -1, -2)]
        t, s0, s1, s2 = (torch.log(alpha) - torch.log(sigma) for alpha, sigma in levels)
        near, far = (s0 - s1) / (t - s0), (s1 - s2) / (t - s0)
        second = ((outputs[-1] - outputs[-2]) / near - (outputs[-2] - outputs[-3]) / far) / (near + far)
        return update(outputs, sample=sample, noise=noise) + levels[0][0] * second

    reference.multistep_dpm_solver_third_order_update = corrected


def run(
    reference,
    steps: int,
    start: np.ndarray,
    draws: Iterator[np.ndarray],
    monkeypatch,
    *,
    model=network,
    skip: int = 0,
    as_it_is: bool = False,
    **extra: object,
):
    """x at the end, and the times at which the network was asked; without the first `skip` times, and `as_it_is`
    without a correction for PNDM."""

    def draw(*_: object, **__: object) -> torch.Tensor:
        return torch.from_numpy(next(draws))

    module = sys.modules[type(reference).__module__]
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", draw)
    reference.set_timesteps(steps)
    x = torch.from_numpy(start) * float(getattr(reference, "init_noise_sigma", 1.0))
    times = []
    velocities = "PNDM" in type(reference).__name__ and reference.config.prediction_type == "v_prediction"
    velocities = velocities and not as_it_is
    if velocities:
        reference.register_to_config(prediction_type="epsilon")
    for time in reference.timesteps[skip:]:
        inputs = reference.scale_model_input(x, time) if hasattr(reference, "scale_model_input") else x
        output = torch.from_numpy(model(inputs.double().numpy(), float(time)))
        if velocities:
            kept = reference.alphas_cumprod[int(time)].double()
            output = kept.sqrt() * output + (1 - kept).sqrt() * x
        times.append(float(time))
        x = reference.step(output, time, x, return_dict=False, **extra)[0]
    return x.double().numpy(), times


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
