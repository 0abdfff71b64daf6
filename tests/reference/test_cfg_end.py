"""`--cfg-end`: against diffusers, whose guidance is switched off between two steps as its documentation shows, and by
what each call of the model was asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_sd
from support.opened_parts import open_part

import qwenimg
from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers import noise
from qwenimg.common.pipeline.steps.guidance import Branch
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.sampling import table
from qwenimg.common.sampling.types import Schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 after all steps, float32, as for guidance that stays
CLASSES = {"sd15": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
PROMPT, NEGATIVE = "a photo of a red circle", "a blue square"
STEPS, END, GUIDED = 5, 0.5, 3  # steps 0, 1 and 2 of 5 are below a half


@pytest.fixture(scope="module")
def initial() -> np.ndarray:
    return noise.normal((1, 4, 9, 11), 7)


def switched_off(calls: int) -> Callable[..., dict[str, torch.Tensor]]:
    """diffusers' callback that leaves so many calls of the model with guidance."""

    def after(pipe: Any, call: int, _: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if call < calls - 1:
            return tensors
        pipe._guidance_scale = 0.0
        return {name: value[-1:] for name, value in tensors.items()}  # the prompt's, which comes last there

    return after


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.sample(0)
def test_stable_diffusion_against_diffusers(folders: dict[str, Path], name: str, initial: np.ndarray) -> None:
    inputs = ["prompt_embeds"] + (["add_text_embeds", "add_time_ids"] if name == "sdxl" else [])
    calls = GUIDED + (name == "sd15")  # of whose sampler, PLMS, one step is two
    asked = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "width": 88, "height": 72, "num_inference_steps": STEPS}
    expected, _ = oracle_sd.generate(
        folders[name], CLASSES[name], latents=torch.from_numpy(initial), guidance_scale=7.5,
        callback_on_step_end=switched_off(calls), callback_on_step_end_tensor_inputs=inputs, **asked,
    )  # fmt: skip
    for backend in BACKENDS:
        pipe = qwenimg.load(folders[name], backend=backend, precision="fp32")
        options = {"negative_prompt": NEGATIVE, "width": 88, "height": 72, "steps": STEPS, "guidance": 7.5, "seed": 0}
        made = pipe(PROMPT, latents=initial, cfg_end=END, **options)
        whole = pipe(PROMPT, latents=initial, **options)
        error = np.linalg.norm(made.latents - expected) / np.linalg.norm(expected)
        other = np.linalg.norm(whole.latents - expected) / np.linalg.norm(expected)
        print(f"{name} {backend}: {error:.1e}, with guidance to the end {other:.1e}")
        assert error <= LATENTS < 10 * LATENTS < other
        assert made.recipe["cfg_end"] == END and "cfg_end" not in whole.recipe


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.sample(1)
def test_qwen_image_makes_one_pass_after_it(tiny_folder: Path, together: bool) -> None:
    """The same on both backends, in one batch or in turn; the last steps are those of a run without guidance."""
    made = {}
    for backend in BACKENDS:
        pipe = qwenimg.load(tiny_folder, backend=backend, precision="fp32")
        pipe.model.batch_guidance = together
        transformer, batches = open_part(pipe, "transformer"), []
        predict = transformer.predict

        def counted(x: Any, step: Any, condition: Any, predict=predict, batches=batches) -> Any:
            batches.append((step[1], condition.txt.shape[0]))
            return predict(x, step, condition)

        transformer.predict = counted
        options = {"negative_prompt": "blurry", "width": 48, "height": 32, "steps": STEPS, "guidance": 4.0, "seed": 3}
        made[backend] = pipe(PROMPT, cfg_end=END, **options).latents
        guided = [(i, 2) for i in range(GUIDED)] if together else [(i, 1) for i in range(GUIDED) for _ in range(2)]
        assert batches == guided + [(i, 1) for i in range(GUIDED, STEPS)]
        assert not np.array_equal(made[backend], pipe(PROMPT, **options).latents)
    error = np.linalg.norm(made["cpu"] - made["mlx"]) / np.linalg.norm(made["mlx"])
    print(f"together {together}: {error:.1e}")
    assert error <= LATENTS


def test_which_steps_are_guided() -> None:
    sigmas = (8.0, 4.0, 2.0, 1.0, 0.0)
    segment = Segment(schedule=Schedule(sigmas=sigmas), solver=table.find("euler").function)
    plan = SamplingPlan(sampler="euler", schedule="model", segments=(segment,))
    shares = {1.0: 4, 0.99: 4, 0.75: 3, 0.5: 2, 0.26: 2, 0.25: 1, 1e-9: 1}
    for share, count in shares.items():
        stretches = plan.stretches([Branch(prompt=""), Branch(prompt="", steps=(0.0, share))])
        assert [active for _, active in stretches] == ([[0, 1], [0]] if count < 4 else [[0, 1]])
        assert sum(sigma > stretches[0][0] for sigma in sigmas[:-1]) == count


@pytest.mark.parametrize("wrong", [0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none(tiny_folder: Path, wrong: float) -> None:
    with pytest.raises(UsageError, match=r"cfg-end is .* above 0 to 1"):
        qwenimg.load(tiny_folder, backend="cpu").check(PROMPT, cfg_end=wrong)
