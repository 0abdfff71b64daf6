"""Few steps: every recipe's noise levels and times against diffusers' schedulers, set up as its model card says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from support import oracle_sd
from support.family_cases import BACKENDS
from support.sampler_reference import SD
from support.tiny_model import LIGHTNING, SCHEDULER

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.qwen_image import variants as qwen
from qwenimg.common.families.qwen_image.variants import TEXT
from qwenimg.common.families.stable_diffusion import few_steps as sd
from qwenimg.common.pipeline.steps.plan import flow_plan
from qwenimg.common.request.request import Request
from qwenimg.common.sampling.discrete import parse_diffusion
from qwenimg.common.sampling.flow_match import FlowMatchConfig
from qwenimg.common.sampling.schedules import build
from qwenimg.common.sampling.table import SAMPLERS

LATENTS = 1e-4  # relative L2, float32; as in test_sd_pipeline.py
FLOAT32 = 2e-5  # relative: diffusers multiplies a thousand factors in float32
SDXL = {**SD, "steps_offset": 1, "timestep_spacing": "leading", "prediction_type": "epsilon"}
SD15 = {**SDXL, "set_alpha_to_one": False}
# How the model cards make their scheduler of the model's
CARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lightning": ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "turbo": ("EulerAncestralDiscreteScheduler", {"timestep_spacing": "trailing"}),
    "hyper": ("DDIMScheduler", {"timestep_spacing": "trailing"}),
    "hyper-cfg": ("DDIMScheduler", {"timestep_spacing": "trailing"}),
    "lcm": ("LCMScheduler", {}),
    "hyper-unified": ("TCDScheduler", {}),
    "hyper-unet": ("LCMScheduler", {}),
}
TIMES = {"hyper-unet": {"timesteps": [800]}}  # that a card gives in the place of a number of steps
WAYS = [("sdxl", name) for name in sd.few_steps(2048, sdxl=True)] + [("sd15", n) for n in sd.few_steps(768, sdxl=False)]


def of_reference(name: str, config: dict[str, Any], steps: int) -> tuple[list[float], list[float]]:
    """Times, and the levels of those times."""
    class_name, changes = CARDS[name]
    scheduler = getattr(diffusers, class_name)(**(config | changes))
    scheduler.set_timesteps(**TIMES.get(name, {"num_inference_steps": steps}))
    times = [float(time) for time in scheduler.timesteps]
    kept = scheduler.alphas_cumprod.double()
    return times, [float(torch.sqrt((1 - kept[int(time)]) / kept[int(time)])) for time in times]


@pytest.mark.parametrize(("model", "name"), WAYS)
def test_stable_diffusion(model: str, name: str) -> None:
    row = sd.few_steps(2048 if model == "sdxl" else 768, sdxl=model == "sdxl")[name]
    config = SDXL if model == "sdxl" else SD15
    class_name = "EulerDiscreteScheduler" if model == "sdxl" else "PNDMScheduler"
    parsed = parse_diffusion({"_class_name": class_name, **config}, "scheduler_config.json")
    for steps in row.steps:
        made = row.settings(steps)
        schedule = build(parsed, SAMPLERS[made["sampler"]].rule, made["schedule"], steps, sdxl=model == "sdxl")
        times, sigmas = of_reference(name, config, steps)
        print(name, steps, [round(time) for time in schedule.timesteps], [f"{sigma:.4f}" for sigma in schedule.sigmas])
        assert list(schedule.timesteps) == times
        np.testing.assert_allclose(schedule.sigmas[:-1], sigmas, rtol=FLOAT32)


# name -> what the card's scheduler and pipeline get besides, and what our model is told
ONE_STEP: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lightning": ({"prediction_type": "sample"}, {}, {"prediction": "x0"}),
    "hyper-unet": ({}, {}, {}),
    "hyper-unified": ({}, {"eta": 1.0}, {}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ONE_STEP)
@pytest.mark.sample(1)
def test_one_step_through_the_whole_pipeline(folders: dict[str, Path], backend: str, name: str) -> None:
    """As the card of a UNet or LoRA of one step says, which random weights take the place of. eta is 1 there: of one
    step it changes nothing."""
    more, asked, told = ONE_STEP[name]
    class_name, changes = CARDS[name]
    reference = oracle_sd.pipeline(folders["sdxl"], "StableDiffusionXLPipeline")
    own = reference.scheduler
    pipe = qwenimg.load(folders["sdxl"], backend=backend, precision="fp32", **told)
    made = {option: value for option, value in pipe.model.few_steps[name].settings(1).items() if option != "lora"}
    try:
        reference.scheduler = getattr(diffusers, class_name).from_config(own.config, **changes, **more)
        steps = TIMES.get(name, {}) | {"num_inference_steps": 1}
        expected = reference(
            "a small dog", guidance_scale=0, output_type="latent", width=88, height=72, **steps, **asked,
            generator=torch.Generator().manual_seed(5),
        ).images.numpy()  # fmt: skip
    finally:
        reference.scheduler = own
    found = pipe("a small dog", width=88, height=72, seed=5, **made).latents
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(f"{name} {backend}: {error:.1e}")
    assert error < LATENTS


def test_a_unet_that_predicts_the_image_has_no_loras(folders: dict[str, Path]) -> None:
    pipe = qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32", prediction="x0")
    assert list(pipe.model.few_steps) == ["lightning"]
    with pytest.raises(UsageError, match="made for 1 step"):
        pipe.check("x", few_steps="lightning:4")
    plain = qwenimg.load(folders["sdxl"], backend="cpu", precision="fp32")
    with pytest.raises(UsageError, match=r"2, 4, 8 steps; one step is a UNet of its own, with --prediction x0"):
        plain.check("x", few_steps="lightning:1")
    with pytest.raises(UsageError, match=r"2, 4, 8 steps; hyper-unified takes 1 to 8"):
        plain.check("x", few_steps="hyper:1")


def test_published_numbers() -> None:
    parsed = parse_diffusion({"_class_name": "EulerDiscreteScheduler", **SDXL}, "x")
    four = build(parsed, SAMPLERS["euler"].rule, "trailing", 4)
    assert four.timesteps == (999, 749, 499, 249)
    np.testing.assert_allclose(four.sigmas, [14.6146, 4.0817, 1.6129, 0.6932, 0], atol=6e-5)
    assert four.initial == pytest.approx(14.6146, abs=6e-5)
    assert build(parsed, SAMPLERS["euler"].rule, "trailing", 8).timesteps[:2] == (999, 874)
    lcm = SAMPLERS["lcm"].rule
    assert build(parsed, lcm, "", 4).timesteps == (999, 759, 499, 259)
    assert build(parsed, lcm, "", 8).timesteps == (999, 879, 759, 639, 499, 379, 259, 139)
    assert build(parsed, SAMPLERS["euler_ancestral"].rule, "trailing", 1).timesteps == (999,)
    assert build(parsed, SAMPLERS["tcd"].rule, "", 1).timesteps == (999,)
    one = build(parsed, lcm, "hyper", 1)
    assert one.timesteps == (800,) and one.sigmas[-1] == 0
    with pytest.raises(UsageError, match="one step from time 800, found 2 steps"):
        build(parsed, lcm, "hyper", 2)
    short = parse_diffusion({"_class_name": "EulerDiscreteScheduler", **SDXL, "num_train_timesteps": 800}, "x")
    with pytest.raises(UsageError, match="800 trained times"):
        build(short, lcm, "hyper", 1)


@pytest.mark.parametrize("side", [256, 1024, 1328])
@pytest.mark.parametrize("steps", [4, 8])
def test_qwen_image_lightning(side: int, steps: int) -> None:
    """Bit for bit those of diffusers' scheduler with the configuration that the LoRA is published with."""
    made = qwen.few_steps("Qwen-Image", TEXT)["lightning"].settings(steps)
    size = {"width": side, "height": side}
    request = Request(prompt="x", **size, **{k: made[k] for k in ("steps", "sampler", "schedule", "guidance")})
    plan = flow_plan(FlowMatchConfig(**SCHEDULER), request, (side // 16) ** 2)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**LIGHTNING)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=math.log(3))
    assert plan.sigmas == tuple(map(float, scheduler.sigmas))
    published = {4: [1, 0.9, 0.75, 0.5, 0], 8: [1, 0.954545, 0.9, 0.833333, 0.75, 0.642857, 0.5, 0.3, 0]}
    np.testing.assert_allclose(plan.sigmas, published[steps], atol=1e-6)
    assert plan.schedule == "lightning" and request.guidance == 1


def test_a_schedule_of_the_other_kind_of_model_is_refused() -> None:
    parsed = parse_diffusion({"_class_name": "EulerDiscreteScheduler", **SDXL}, "x")
    with pytest.raises(UsageError, match="is trailing"):
        build(parsed, SAMPLERS["euler"].rule, "lightning", 4)
    with pytest.raises(UsageError, match=r"--schedule trailing has no form .* karras, exponential, beta, lightning"):
        flow_plan(FlowMatchConfig(**SCHEDULER), Request(prompt="x", schedule="trailing"), 256)
    with pytest.raises(UsageError, match="--schedule beta: this model has its own noise levels only"):
        flow_plan(FlowMatchConfig(sample_sigmas=(1.0, 0.5)), Request(prompt="x", steps=2, schedule="beta"), 256)
