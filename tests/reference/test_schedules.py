"""Noise levels, times, schedules and their parts, against diffusers, published tables and closed forms."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampler_reference import SD, scheduler

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.sampling.discrete import clock, parse_diffusion, scalings
from qwenimg.common.sampling.schedules import SCHEDULES, build, part, sampler_of, skipped, split
from qwenimg.common.sampling.spacing import AYS_SD, AYS_SDXL, ays, beta_quantile
from qwenimg.common.sampling.table import SAMPLERS
from qwenimg.common.sampling.types import Schedule

FLOAT32 = 2e-5  # relative: diffusers multiplies a thousand factors in float32
BETAS = {
    "SD": SD,
    "linear": {"beta_schedule": "linear"},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}
SD15 = {"_class_name": "PNDMScheduler", **SD, "steps_offset": 1, "skip_prk_steps": True, "trained_betas": None}
SD15 |= {"_diffusers_version": "0.6.0", "set_alpha_to_one": False, "clip_sample": False}


def config(name: str = "EulerDiscreteScheduler", **fields):
    return parse_diffusion({"_class_name": name, **SD, **fields}, "scheduler_config.json")


@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("zero_snr", [False, True])
def test_levels_equal_diffusers(name, zero_snr):
    fields = BETAS[name] | {"rescale_betas_zero_snr": zero_snr}
    reference = scheduler("euler_discrete", "EulerDiscreteScheduler", **fields)
    kept = reference.alphas_cumprod.double()
    expected = torch.sqrt((1 - kept) / kept).numpy()
    found = np.array(parse_diffusion({"_class_name": "EulerDiscreteScheduler", **fields}, "x").levels.sigmas)
    worst = float(np.abs(found / expected - 1)[:-1].max())
    print(f"{name}, zero SNR {zero_snr}: {worst:.1e}; largest {found[-2]:.4f} and {found[-1]:.4f}")
    # Levels of small betas, and those before infinity, are differences of nearly equal numbers in float32.
    assert worst < (FLOAT32 if name == "SD" and not zero_snr else 3e-3)
    assert found[-1] == pytest.approx(max(4096, math.sqrt(2) * found[-2]) if zero_snr else expected[-1], rel=2e-3)


def test_published_numbers():
    """SDXL's four steps, as its own configuration gives them."""
    levels = build(config(steps_offset=1, timestep_spacing="leading"), SAMPLERS["euler"].rule, "model", 4)
    assert levels.timesteps == (751, 501, 251, 1)
    np.testing.assert_allclose(levels.sigmas, [4.1167, 1.6237, 0.6984, 0.0413, 0], atol=6e-5)
    assert levels.initial == pytest.approx(4.2364, abs=6e-5)
    assert build(parse_diffusion(SD15, "x"), SAMPLERS["pndm"].rule, "model", 4).timesteps == (751, 501, 251, 1)


def test_times_are_exact_on_the_trained_levels():
    levels = config().levels
    assert [levels.timestep(sigma) for sigma in levels.sigmas] == list(range(1000))
    assert [levels.sigma(time) for time in range(1000)] == list(levels.sigmas)
    assert levels.timestep(1e-9) == 0 and levels.timestep(1e9) == 999


@settings(max_examples=100)
@given(st.floats(0, 999))
def test_times_and_levels_are_inverse(time):
    levels = config().levels
    assert levels.timestep(levels.sigma_log(time)) == pytest.approx(time, abs=1e-8)


def test_times_between_the_levels_equal_diffusers():
    reference, levels = scheduler("euler_discrete", "EulerDiscreteScheduler", **SD), config().levels
    kept = np.asarray(reference.alphas_cumprod, dtype=np.float64)
    logs = np.log(np.sqrt((1 - kept) / kept))
    for sigma in np.geomspace(0.02, 20, 57):
        expected = float(reference._sigma_to_t(np.asarray(sigma), logs))
        assert levels.timestep(float(sigma)) == pytest.approx(expected, abs=2e-3)


def test_a_schedules_own_times_come_first():
    levels = build(config(timestep_spacing="linspace"), SAMPLERS["euler"].rule, "model", 7)
    time = clock(config().levels, levels)
    assert [time(sigma) for sigma in levels.sigmas[:-1]] == list(levels.timesteps)
    assert time(1.0) == config().levels.timestep(1.0)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("sigma", [0.03, 1.0, 14.6, 4096.0])
def test_scalings_undo_the_prediction(prediction, sigma):
    """By definition: with a = 1 / sqrt(sigma^2 + 1) the model sees a x, and predicts noise, a noise - a sigma image, or
    the image."""
    image, noise = 0.7, -1.3
    x, a = image + sigma * noise, 1 / math.sqrt(sigma**2 + 1)
    said = {"epsilon": noise, "v_prediction": a * noise - a * sigma * image, "sample": image}[prediction]
    c_in, c_skip, c_out = scalings(prediction, sigma)
    assert c_in == pytest.approx(a, rel=1e-15)
    assert c_skip * x + c_out * said == pytest.approx(image, rel=1e-9 * sigma + 1e-9)


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("EulerDiscreteScheduler", "euler_discrete"),
        ("DPMSolverMultistepScheduler", "dpmsolver_multistep"),
        ("DDIMScheduler", "ddim"),
    ],
)
def test_every_number_of_steps_equals_diffusers(name, module, spacing):
    fields = {**SD, "timestep_spacing": spacing, "steps_offset": 0}
    reference, ours = scheduler(module, name, **fields), config(name, **fields)
    for steps in [*range(2, 60), 75, 100, 125, 250, 333, 500]:
        reference.set_timesteps(steps)
        found = build(ours, SAMPLERS[sampler_of(ours)].rule, "model", steps).timesteps
        expected = reference.timesteps.double().numpy()[:steps]  # an element more where T / steps is rounded down
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=str(steps))


def test_lcm_equals_diffusers_in_every_number_of_steps():
    reference, ours = scheduler("lcm", "LCMScheduler"), parse_diffusion({"_class_name": "LCMScheduler"}, "x")
    for steps in range(1, 51):
        reference.set_timesteps(steps)
        assert build(ours, SAMPLERS["lcm"].rule, "model", steps).timesteps == tuple(reference.timesteps.tolist())
    with pytest.raises(UsageError, match="51 steps: this model was distilled on 50"):
        build(ours, SAMPLERS["lcm"].rule, "model", 51)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("lightning", "hyper", "dmd")])
@pytest.mark.parametrize("steps", [1, 2, 10, 33, 100])
def test_all_schedules_fall_from_noise_to_nothing(schedule, steps):
    for ours in (config(), config(rescale_betas_zero_snr=True, prediction_type="v_prediction")):
        levels = build(ours, SAMPLERS["euler"].rule, schedule, steps, sdxl=steps % 2 == 0)
        sigmas = levels.sigmas
        assert all(high > low for high, low in pairwise(sigmas)) and sigmas[-1] == 0
        assert len(levels.timesteps) == len(sigmas) - 1 <= steps
        assert schedule == "beta" or len(sigmas) == steps + 1
        assert all(0 <= time <= 999 for time in levels.timesteps)


def test_karras_and_exponential_by_their_formulas():
    ours = config()
    low, high = ours.levels.sigmas[0], ours.levels.sigmas[-1]
    for steps in (2, 9):
        ramp = np.linspace(0, 1, steps)
        karras = (high ** (1 / 7) + ramp * (low ** (1 / 7) - high ** (1 / 7))) ** 7
        np.testing.assert_allclose(build(ours, SAMPLERS["euler"].rule, "karras", steps).sigmas[:-1], karras, rtol=1e-12)
        even = np.exp(np.linspace(math.log(high), math.log(low), steps))
        np.testing.assert_allclose(
            build(ours, SAMPLERS["euler"].rule, "exponential", steps).sigmas[:-1], even, rtol=1e-12
        )


def test_simple_and_sgm_uniform():
    ours = config()
    assert build(ours, SAMPLERS["euler"].rule, "simple", 4).timesteps == (999, 749, 499, 249)
    assert build(ours, SAMPLERS["euler"].rule, "simple", 7).timesteps == tuple(
        999 - int(i * 1000 / 7) for i in range(7)
    )
    np.testing.assert_allclose(
        build(ours, SAMPLERS["euler"].rule, "sgm_uniform", 4).timesteps, [999, 749.25, 499.5, 249.75], rtol=1e-9
    )


def test_align_your_steps():
    """diffusers' tables end with 0 in place of the last level; other numbers of steps by numpy's interpolation."""
    from diffusers.schedulers.scheduling_utils import AysSchedules

    assert [*ays(AYS_SD, 10), 0.0] == AysSchedules["StableDiffusionSigmas"]
    assert [*ays(AYS_SDXL, 10), 0.0] == AysSchedules["StableDiffusionXLSigmas"]
    for table in (AYS_SD, AYS_SDXL):
        for steps in (1, 7, 25):
            at = np.linspace(0, 1, steps + 1)
            expected = np.exp(np.interp(at, np.linspace(0, 1, 11), np.log(table)))[:-1]
            np.testing.assert_allclose(ays(table, steps), expected, rtol=1e-12)
    assert (
        build(config(), SAMPLERS["euler"].rule, "ays", 10, sdxl=True).sigmas
        != build(config(), SAMPLERS["euler"].rule, "ays", 10).sigmas
    )


def test_quantiles_of_the_beta_distribution():
    """The arcsine distribution, Beta(1/2, 1/2), has a closed form; of Beta(0.6, 0.6) the density is integrated."""
    for share in (0.0, 1e-3, 0.2, 0.5, 0.77, 1.0):
        assert beta_quantile(share, 0.5) == pytest.approx(math.sin(math.pi * share / 2) ** 2, abs=1e-12)
    points, weights = np.polynomial.legendre.leggauss(200)
    for share in (0.05, 0.3, 0.5, 0.9):
        # x = u^5 takes the density's x^-0.4 away at 0
        end = beta_quantile(share, 0.6) ** (1 / 5)
        u = end * (points + 1) / 2
        reached = end / 2 * np.sum(weights * 5 * u**4 * u ** (-2) * (1 - u**5) ** (-0.4))
        scale = math.gamma(1.2) / math.gamma(0.6) ** 2
        assert scale * reached == pytest.approx(share, abs=2e-4 if share > 0.8 else 1e-9)


def test_strength_is_counted_as_in_diffusers():
    for steps in (1, 4, 7, 50):
        for strength in (0.01, 0.3, 0.35, 0.75, 0.8, 0.999, 1.0):
            left = steps - max(steps - min(int(steps * strength), steps), 0)
            if left == 0:
                with pytest.raises(UsageError, match="leaves none"):
                    skipped(steps, strength)
            else:
                assert steps - skipped(steps, strength) == left
    whole = build(parse_diffusion(SD15, "x"), SAMPLERS["pndm"].rule, "model", 10)
    late = part(whole, 4)
    assert late.sigmas == whole.sigmas[4:] and late.timesteps == whole.timesteps[4:] and late.final == whole.final
    assert part(whole, 0, 4).final == 1.0 != whole.final


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.8, 0.85])
@pytest.mark.parametrize("steps", [5, 25, 50])
def test_a_split_equals_diffusers(fraction, steps):
    """The base keeps times at or above the cut, the refiner those below."""
    whole = build(config(steps_offset=1, timestep_spacing="leading"), SAMPLERS["euler"].rule, "model", steps)
    border = round(1000 - fraction * 1000)
    first, second = split(whole, fraction)
    assert first.timesteps == tuple(time for time in whole.timesteps if time >= border)
    assert second.timesteps == tuple(time for time in whole.timesteps if time < border)
    assert first.sigmas[-1] == second.sigmas[0] and first.sigmas + second.sigmas[1:] == whole.sigmas


def test_a_split_needs_steps_on_both_sides():
    whole = build(config(steps_offset=1, timestep_spacing="leading"), SAMPLERS["euler"].rule, "model", 4)
    for fraction in (0.0, 0.1, 1.0):
        with pytest.raises(UsageError, match=r"leaves the (base|refiner) none"):
            split(whole, fraction)


def test_half_the_logarithm_of_signal_to_noise():
    for levels in (Schedule(sigmas=(1.0, 0.0), flow=True), Schedule(sigmas=(1.0, 0.0))):
        assert levels.half_log_snr(0.0) == math.inf
        for sigma in (0.2, 0.5, 0.93):
            by_definition = math.log(((1 - sigma) if levels.flow else 1) / sigma)
            assert levels.half_log_snr(sigma) == pytest.approx(by_definition, rel=1e-14)
            assert levels.sigma_at(by_definition) == pytest.approx(sigma, rel=1e-14)
    assert Schedule(sigmas=(1.0, 0.0), flow=True).half_log_snr(1.0) == -math.inf


# Configurations.


def test_every_class_has_the_defaults_of_diffusers():
    from qwenimg.common.sampling import discrete

    files = {
        "PNDMScheduler": "pndm", "DDIMScheduler": "ddim", "DDPMScheduler": "ddpm",
        "EulerDiscreteScheduler": "euler_discrete", "EulerAncestralDiscreteScheduler": "euler_ancestral_discrete",
        "HeunDiscreteScheduler": "heun_discrete", "LMSDiscreteScheduler": "lms_discrete",
        "KDPM2DiscreteScheduler": "k_dpm_2_discrete", "KDPM2AncestralDiscreteScheduler": "k_dpm_2_ancestral_discrete",
        "DPMSolverMultistepScheduler": "dpmsolver_multistep", "DPMSolverSinglestepScheduler": "dpmsolver_singlestep",
        "DPMSolverSDEScheduler": "dpmsolver_sde", "UniPCMultistepScheduler": "unipc_multistep",
        "DEISMultistepScheduler": "deis_multistep", "SASolverScheduler": "sasolver", "LCMScheduler": "lcm",
        "TCDScheduler": "tcd",
    }  # fmt: skip
    assert files.keys() == discrete._DEFAULTS.keys()
    for name, file in files.items():
        reference = scheduler(file, name)
        found = parse_diffusion({"_class_name": name}, "x")
        saved = parse_diffusion(json.loads(reference.to_json_string()), "x")
        for key, value in vars(found).items():
            if key != "class_name" and reference.config.get(key) is not None:
                assert value == reference.config[key] == getattr(saved, key), (name, key)


def test_what_a_configuration_means():
    assert sampler_of(parse_diffusion(SD15, "x")) == "pndm"
    assert sampler_of(config("DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++")) == "dpmpp_2m_sde"
    for name, fields in [
        ("DPMSolverSinglestepScheduler", {}),
        ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver"}),
        ("DPMSolverMultistepScheduler", {"solver_order": 3}),
        ("UniPCMultistepScheduler", {"solver_order": 3}),
        ("UniPCMultistepScheduler", {"solver_type": "bh1"}),
        ("DEISMultistepScheduler", {"solver_order": 3}),
        ("SASolverScheduler", {"predictor_order": 3}),
    ]:
        with pytest.raises(ModelError, match="choose another with --sampler"):
            sampler_of(config(name, **fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"_class_name": "EDMEulerScheduler"}, "class_name is 'EDMEulerScheduler'"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule is 'sigmoid'"),
        ({"prediction_type": "flow_prediction"}, "prediction_type is 'flow_prediction'"),
        ({"timestep_spacing": "uneven"}, "timestep_spacing is 'uneven'"),
        ({"beta_end": 1e-5}, "expected 0 < beta_start <= beta_end < 1"),
        ({"thresholding": True}, "'thresholding' is True"),
        ({"use_beta_sigmas": True}, "'use_beta_sigmas' is True"),
        ({"use_karras_sigmas": True, "use_exponential_sigmas": True}, "are both true"),
        ({"trained_betas": [0.1, 0.2]}, "'trained_betas'"),
        ({"interpolation_type": "log_linear"}, "interpolation_type is 'log_linear'"),
        ({"timestep_type": "continuous"}, "timestep_type is 'continuous'"),
        ({"variance_type": "learned_range"}, "variance_type is 'learned_range'"),
        ({"lambda_min_clipped": -5.1}, "'lambda_min_clipped' is -5.1"),
        ({"disable_corrector": [0]}, "'disable_corrector' is [0]"),
        ({"steps_offset": -1}, "'steps_offset' is -1"),
        ({"beta_start": float("nan")}, "finite"),
        ({"num_train_timesteps": 1}, "num_train_timesteps"),
        ({"original_inference_steps": 2000}, "more than num_train_timesteps, which is 1000"),
        ({"num_train_timesteps": 10**9}, "num_train_timesteps"),
    ],
)
def test_refuses_what_it_does_not_know(fields, says):
    with pytest.raises(ModelError) as caught:
        parse_diffusion({"_class_name": "DDIMScheduler", **SD, **fields}, "scheduler_config.json")
    print(caught.value)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [0, -3, 1001])
def test_refuses_other_numbers_of_steps(steps):
    with pytest.raises(UsageError, match=f"steps is {steps}"):
        build(config(), SAMPLERS["euler"].rule, "model", steps)


def test_refuses_other_schedules_and_too_many_steps():
    with pytest.raises(UsageError, match="no schedule 'linear'; choose one of model, karras"):
        build(config(), SAMPLERS["euler"].rule, "linear", 10)
    with pytest.raises(UsageError, match="too many"):
        build(config("DPMSolverMultistepScheduler"), SAMPLERS["dpmpp_2m"].rule, "model", 1000)
    with pytest.raises(UsageError, match="too many"):
        build(config(timestep_spacing="leading", steps_offset=1), SAMPLERS["euler"].rule, "model", 1000)
