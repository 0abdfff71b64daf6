"""Samplers on the built-in model, a flow model that has learned something: held against diffusers' on the same levels,
and against Euler's pictures, which they must be near."""

from __future__ import annotations

from functools import cache
from types import MethodType

import diffusers
import numpy as np
import pytest
import torch
from support import oracle

import qwenimg
from qwenimg.common.families import catalog
from qwenimg.common.numbers import noise
from qwenimg.common.shapes import builtin
from qwenimg.common.shapes.check import ideal_overlap

R = catalog.BUILT_IN
PROMPT, SEED, SIDE = "a blue square", 1, 128
SOLVERS = ("heun", "dpmpp_2m")
DISTANCE = 1e-4  # relative, of latents after 20 steps in float32: measured 7e-7 (heun) and 4e-6 (dpmpp_2m)


def reference(name: str):
    """diffusers' scheduler with the levels of the model's own: it has no other way to be given them."""
    euler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(builtin.folder(), subfolder="scheduler")
    if name == "heun":
        found = diffusers.FlowMatchHeunDiscreteScheduler()
    else:
        found = diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")

    def set_timesteps(self, *, sigmas, device=None, mu=None):
        euler.set_timesteps(sigmas=sigmas, mu=mu)
        levels = euler.sigmas
        if name == "heun":  # which asks at both ends of each step but the last
            levels = torch.cat([levels[:1], levels[1:-1].repeat_interleave(2), levels[-1:]])
        type(self).set_timesteps(self, len(sigmas))
        self.sigmas, self.timesteps, self.num_inference_steps = levels, 1000 * levels[:-1], len(levels) - 1

    found.set_timesteps = MethodType(set_timesteps, found)
    found.register_to_config(**{k: euler.config[k] for k in ("base_shift", "max_shift", "max_image_seq_len")})
    return found


@pytest.fixture(scope="module")
def drawn():
    """The picture of a sampler, drawn once."""
    pipe = qwenimg.load(backend="cpu", precision="fp32")
    asked = {"seed": SEED, "width": SIDE, "height": SIDE, "steps": R.steps, "guidance": R.guidance}
    return cache(lambda sampler: pipe(PROMPT, sampler=sampler, **asked))


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.sample(0)
def test_equals_diffusers_on_a_trained_flow_model(drawn, name, monkeypatch):
    with_dtype = oracle.pipeline(builtin.folder(), torch.float32)  # the one that `generate` takes
    monkeypatch.setattr(with_dtype, "scheduler", reference(name))
    start = noise.normal((1, 16, SIDE // 8, SIDE // 8), SEED)
    expected, _ = oracle.generate(
        builtin.folder(), PROMPT, start, negative_prompt=R.negative_prompt, steps=R.steps, guidance=R.guidance
    )
    found = drawn(name).latents
    distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    print(f"{name}: {distance:.1e}")
    assert distance < DISTANCE


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.sample(0)
def test_pictures_are_as_crisp_as_eulers(drawn, name):
    """20 steps are enough for either order. Measured: euler 0.930, heun 0.929, dpmpp_2m 0.919."""
    euler, found = (ideal_overlap(drawn(sampler).pixels) for sampler in ("euler", name))
    print(f"euler {euler:.3f}, {name} {found:.3f}")
    assert euler > 0.85 and abs(found - euler) < 0.03
