"""Samplers and the model's own schedule against diffusers: the same network, start and noise on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from support.sampler_reference import (
    SD,
    Denoiser,
    correct_third_order,
    noises,
    relative,
    run,
    scheduler,
)

from qwenimg.common.sampling.discrete import parse_diffusion
from qwenimg.common.sampling.schedules import build, part, sampler_of
from qwenimg.common.sampling.steps import diffused, halfway, unchanged
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.common.sampling.types import Schedule

# The references compute their levels, and some their steps, in float32; measured at most 2.1e-5.
TOLERANCE = 5e-5
SPACINGS = ("leading", "linspace", "trailing")
EVEN = ("leading", "trailing")  # see sampler_reference.py
UNIPC = ("unipc_multistep", "UniPCMultistepScheduler")
DPM = ("dpmsolver_multistep", "DPMSolverMultistepScheduler")
ZERO_SNR = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}

CASES = {
    "pndm": ("pndm", "PNDMScheduler", {"skip_prk_steps": True}, EVEN),
    "pndm, Runge-Kutta": ("pndm", "PNDMScheduler", {"skip_prk_steps": False}, ("leading",)),
    "pndm to 1": ("pndm", "PNDMScheduler", {"skip_prk_steps": True, "set_alpha_to_one": True}, EVEN),
    "ddim": ("ddim", "DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False}, EVEN),
    "ddim to 1": ("ddim", "DDIMScheduler", {"clip_sample": False}, EVEN),
    "ddim, zero SNR": ("ddim", "DDIMScheduler", {"clip_sample": False, **ZERO_SNR}, ("trailing",)),
    "ddpm": ("ddpm", "DDPMScheduler", {"clip_sample": False}, SPACINGS),
    "ddpm, linear": ("ddpm", "DDPMScheduler", {"clip_sample": False, "beta_schedule": "linear"}, SPACINGS),
    "ddpm, cosine": ("ddpm", "DDPMScheduler", {"clip_sample": False, **COSINE}, ("leading",)),
    "euler": ("euler_discrete", "EulerDiscreteScheduler", {}, SPACINGS),
    "euler, karras": ("euler_discrete", "EulerDiscreteScheduler", {"use_karras_sigmas": True}, SPACINGS),
    "euler, exponential": ("euler_discrete", "EulerDiscreteScheduler", {"use_exponential_sigmas": True}, SPACINGS),
    "euler to sigma min": ("euler_discrete", "EulerDiscreteScheduler", {"final_sigmas_type": "sigma_min"}, SPACINGS),
    "euler, zero SNR": ("euler_discrete", "EulerDiscreteScheduler", ZERO_SNR, ("trailing",)),
    "euler_ancestral": ("euler_ancestral_discrete", "EulerAncestralDiscreteScheduler", {}, SPACINGS),
    "heun": ("heun_discrete", "HeunDiscreteScheduler", {}, SPACINGS),
    "heun, karras": ("heun_discrete", "HeunDiscreteScheduler", {"use_karras_sigmas": True}, SPACINGS),
    "lms": ("lms_discrete", "LMSDiscreteScheduler", {}, SPACINGS),
    "dpm2": ("k_dpm_2_discrete", "KDPM2DiscreteScheduler", {}, SPACINGS),
    "dpm2_ancestral": ("k_dpm_2_ancestral_discrete", "KDPM2AncestralDiscreteScheduler", {}, SPACINGS),
    "dpmpp_2m": (*DPM, {}, SPACINGS),
    "dpmpp_2m, karras": (*DPM, {"use_karras_sigmas": True}, SPACINGS),
    "dpmpp_2m to sigma min": (*DPM, {"final_sigmas_type": "sigma_min"}, SPACINGS),
    "dpmpp_2m, zero SNR": (*DPM, ZERO_SNR, ("trailing",)),
    "dpmpp_2m_sde": (*DPM, {"algorithm_type": "sde-dpmsolver++"}, SPACINGS),
    "dpmpp_2m_sde_heun": (*DPM, {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"}, SPACINGS),
    "dpmpp_3m_sde": (*DPM, {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun", "solver_order": 3}, SPACINGS),
    "unipc": (*UNIPC, {}, SPACINGS),
    "unipc to sigma min": (*UNIPC, {"final_sigmas_type": "sigma_min"}, SPACINGS),
    "deis": ("deis_multistep", "DEISMultistepScheduler", {}, SPACINGS),
    "sa_solver": ("sasolver", "SASolverScheduler", {}, SPACINGS),
    "sa_solver, karras": ("sasolver", "SASolverScheduler", {"use_karras_sigmas": True}, ("leading",)),
    "unipc, karras to sigma min": (*UNIPC, {"final_sigmas_type": "sigma_min", "use_karras_sigmas": True}, ("leading",)),
    "lcm": ("lcm", "LCMScheduler", {}, ("leading",)),
    "tcd": ("tcd", "TCDScheduler", {}, ("leading",)),
}  # fmt: skip


def configurations(name: str, fields: dict, spacings: tuple[str, ...]):
    for spacing in spacings:
        for prediction in ("epsilon", "v_prediction"):
            config = {**SD, "prediction_type": prediction, "timestep_spacing": spacing, **fields}
            if spacing == "leading" and name not in ("LCMScheduler", "TCDScheduler"):
                config["steps_offset"] = 1
            yield config


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_equals_diffusers(case, monkeypatch):
    module, name, fields, spacings = CASES[case]
    worst, late = 0.0, 0.0
    for config in configurations(name, fields, spacings):
        ours = parse_diffusion({"_class_name": name, **config, "trained_betas": None}, "scheduler_config.json")
        sampler = SAMPLERS[sampler_of(ours)]
        assert case.split(",")[0].split(" ")[0] == sampler.name
        for steps in (20,) if sampler.name == "dpmpp_3m_sde" else (4, 20):
            reference = scheduler(module, name, **config)
            if sampler.name == "dpmpp_3m_sde":
                correct_third_order(reference)
            start = next(noises(5))
            expected, times = run(reference, steps, start, noises(9), monkeypatch)
            levels, draws = build(ours, sampler.rule, "model", steps), noises(9)
            denoise = Denoiser(ours, levels)
            *_, found = unchanged(sampler.function(levels.initial * start, levels, denoise, lambda d=draws: next(d)))
            assert len(times) == len(denoise.times)
            late = max(late, *(abs(a - b) for a, b in zip(times, denoise.times, strict=True)))
            worst = max(worst, relative(levels.final * found, expected))
    print(f"{case}: largest difference {worst:.1e}, of the times {late:.1e}")
    assert worst < TOLERANCE
    assert late < 2e-3  # interpolated times; a whole step is 1


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_ddim_with_noise_equals_diffusers(eta, monkeypatch):
    config = {**SD, "clip_sample": False, "steps_offset": 1}
    ours = parse_diffusion({"_class_name": "DDIMScheduler", **config}, "scheduler_config.json")
    reference, start, draws = scheduler("ddim", "DDIMScheduler", **config), next(noises(5)), noises(9)
    expected, _ = run(reference, 10, start, noises(9), monkeypatch, eta=eta)
    levels = build(ours, SAMPLERS["ddim"].rule, "model", 10)
    denoise = Denoiser(ours, levels)
    *_, found = unchanged(
        SAMPLERS["ddim"].function(levels.initial * start, levels, denoise, lambda: next(draws), eta=eta)
    )
    difference = relative(levels.final * found, expected)
    print(f"eta {eta}: {difference:.1e}")
    assert difference < TOLERANCE


@pytest.mark.parametrize("spacing", SPACINGS)
def test_dpmpp_sde_equals_diffusers(spacing, monkeypatch):
    """The reference is given our path: a draw for the first half, and the two halves' noise for the whole."""
    config = {**SD, "timestep_spacing": spacing}
    ours = parse_diffusion({"_class_name": "DPMSolverSDEScheduler", **config}, "scheduler_config.json")
    levels = build(ours, SAMPLERS[sampler_of(ours)].rule, "model", 8)
    plain, draws = Schedule(sigmas=levels.sigmas), noises(9)

    def path(sigma, after, kept=[]):  # noqa: B006
        sigma, after = float(sigma), float(after)
        if not kept:
            kept.append((after, next(draws)))
            return torch_of(kept[0][1])
        middle, first = kept.pop()
        assert middle == pytest.approx(halfway(plain, sigma, after), rel=1e-5)
        _, _, early = diffused(plain, sigma, middle)
        carried, _, late = diffused(plain, middle, after)
        _, _, whole = diffused(plain, sigma, after)
        assert (carried * early) ** 2 + late**2 == pytest.approx(whole**2, rel=1e-9)
        return torch_of((carried * early * first + late * next(draws)) / whole)

    reference = scheduler("dpmsolver_sde", "DPMSolverSDEScheduler", **config)
    set_timesteps = reference.set_timesteps

    def with_noise(steps):
        set_timesteps(steps)
        reference.noise_sampler = path

    monkeypatch.setattr(reference, "set_timesteps", with_noise)
    start, ours_draws = next(noises(5)), noises(9)
    expected, times = run(reference, 8, start, iter(()), monkeypatch)
    denoise = Denoiser(ours, levels)
    *_, found = unchanged(
        SAMPLERS["dpmpp_sde"].function(levels.initial * start, levels, denoise, lambda: next(ours_draws))
    )
    difference = relative(found, expected)
    print(f"{spacing}: {difference:.1e}")
    assert difference < TOLERANCE
    np.testing.assert_allclose(denoise.times, times, atol=2e-3)


def torch_of(array: np.ndarray):
    import torch

    return torch.from_numpy(array)


DEFECTS = {
    "v-prediction": ("pndm", "PNDMScheduler", {"skip_prk_steps": True, "prediction_type": "v_prediction"}, 10, 0),
    "from a picture": ("pndm", "PNDMScheduler", {"skip_prk_steps": True}, 10, 3),
    "linspace": ("ddim", "DDIMScheduler", {"clip_sample": False, "timestep_spacing": "linspace"}, 10, 0),
    "uneven steps": ("ddim", "DDIMScheduler", {"clip_sample": False, "timestep_spacing": "trailing"}, 30, 0),
    "third order": (*DPM, {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun", "solver_order": 3}, 20, 0),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_of_the_reference_are_still_there(defect, monkeypatch):
    """They are listed in docs/promises.md."""
    module, name, fields, steps, skip = DEFECTS[defect]
    config = {**SD, **fields}
    ours = parse_diffusion({"_class_name": name, **config}, "scheduler_config.json")
    sampler = sampler_of(ours)
    reference, start, draws = scheduler(module, name, **config), next(noises(5)), noises(9)
    expected, _ = run(reference, steps, start, noises(9), monkeypatch, skip=skip, as_it_is=True)
    levels = part(build(ours, SAMPLERS[sampler].rule, "model", steps), skip)
    x = start * np.hypot(levels.sigmas[0], 1.0)
    *_, found = unchanged(SAMPLERS[sampler].function(x, levels, Denoiser(ours, levels), lambda: next(draws)))
    difference = relative(levels.final * found, expected)
    print(f"{defect}: {difference:.1e}")
    assert difference > 100 * TOLERANCE
