"""Z-Image's guidance with a largest length and an end by the noise level, on both backends, against diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_zimage
from support.relative import relative

import qwenimg
from qwenimg.common.families.z_image.model import ZImage
from qwenimg.common.numbers import noise
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.pipeline.steps.guidance import Branch
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.sampling import table
from qwenimg.common.sampling.flow_match import FlowMatchConfig, flow_schedule, gone
from qwenimg.common.sampling.types import Schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents, as in test_zimage_pipeline
ASKED: dict[str, Any] = {"negative_prompt": "低质量, blurry", "steps": 8, "guidance": 4.0}
PROMPT = "a star above a ring, 3 hearts"
CASES: list[dict[str, float]] = [
    {"cfg_normalization": 1.0},
    {"cfg_normalization": 0.6},
    {"cfg_normalization": 50.0},  # never reached
    {"cfg_truncation": 0.3},
    {"cfg_truncation": 0.1},  # the third level is 0.9, and float32 has 0.10000000149 of the noise gone there
    {"cfg_normalization": 1.0, "cfg_truncation": 0.5},
]


@pytest.fixture(scope="module")
def start() -> np.ndarray:
    return noise.normal((1, 16, 8, 6), seed=7)


@pytest.fixture(scope="module")
def plain(tiny_zimage: Path, start: np.ndarray) -> np.ndarray:
    return oracle_zimage.generate(tiny_zimage, PROMPT, start, **ASKED)[0]


@pytest.mark.parametrize("more", CASES, ids=str)
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_zimage: Path, start: np.ndarray, plain: np.ndarray, more: dict[str, float]) -> None:
    latents, _ = oracle_zimage.generate(tiny_zimage, PROMPT, start, **ASKED, **more)
    acts = relative(latents, plain)
    for backend in BACKENDS:
        pipe = qwenimg.load(tiny_zimage, backend=backend, precision="fp32")
        result = pipe(PROMPT, width=48, height=64, seed=7, **ASKED, **more)
        error = relative(result.latents, latents)
        print(f"{backend} {more}: {error:.1e} (limit {LATENTS}), without it {acts:.1e}")
        assert error <= LATENTS and not result.warnings
        assert {name: result.recipe[name] for name in more} == more
    assert acts > 100 * LATENTS or more == {"cfg_normalization": 50.0}


@pytest.mark.sample(0)
def test_a_limit_for_each_token_is_another(tiny_zimage: Path, start: np.ndarray, monkeypatch) -> None:
    """The fault of taking Qwen-Image's formula, and that of a truncation by steps, both show."""
    limited, _ = oracle_zimage.generate(tiny_zimage, PROMPT, start, **ASKED, cfg_normalization=1.0)
    ended, _ = oracle_zimage.generate(tiny_zimage, PROMPT, start, **ASKED, cfg_truncation=0.3)
    pipe = qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")
    of_steps = pipe(PROMPT, width=48, height=64, seed=7, **ASKED, cfg_end=0.3)
    assert relative(of_steps.latents, ended) > 100 * LATENTS

    def for_tokens(guided: Any, conditional: Any, most: float) -> Any:
        lengths = [np.linalg.norm(pipe.engine.numpy(x), axis=-1, keepdims=True) for x in (guided, conditional)]
        return guided * pipe.engine.array(np.minimum(most * lengths[1] / lengths[0], 1).astype(np.float32))

    monkeypatch.setattr(pipe.engine, "shortened", for_tokens)
    faulty = pipe(PROMPT, width=48, height=64, seed=7, **ASKED, cfg_normalization=1.0)
    assert relative(faulty.latents, limited) > 100 * LATENTS


def test_steps_without_guidance_count_once(tiny_zimage: Path) -> None:
    """As one pass and not two, in plans and estimates."""
    sigmas = flow_schedule(FlowMatchConfig(shift=3.0), 8, 12)
    segment = Segment(schedule=Schedule(sigmas=sigmas, flow=True), solver=table.find("euler").function)
    plan = SamplingPlan(sampler="euler", schedule="model", segments=(segment,))
    both = (Branch(prompt="a"), Branch(prompt="b", until=0.3, steps=(0.0, 0.9)))
    used = [gone(sigma) <= 0.3 for sigma in sigmas[:8]]
    assert plan.passes(both[1:]) == sum(used) == 5
    assert plan.stretches(both) == [(sigmas[5], [0, 1]), (-1.0, [0])]
    assert plan.stretches((both[0], Branch(prompt="b", until=-1.0))) == [(-1.0, [0])]
    pipe = qwenimg.load(tiny_zimage, backend="cpu", precision="fp32")
    assert isinstance(pipe.model, ZImage)

    def passes(**more: float) -> float:
        request = pipe.check(PROMPT, width=48, height=64, **ASKED, **more)
        [stage] = pipe.model.steps(request, pipe.model.plan(request), LatentShape(1, 8, 6), [20, 20])
        return stage.splits[0].passes

    assert (passes(), passes(cfg_truncation=0.3), passes(cfg_end=0.5)) == (16, 13, 12)


def test_other_families_say_that_it_has_no_effect(tiny_folder: Path) -> None:
    pipe = qwenimg.load(tiny_folder, backend="cpu", precision="fp32")
    result = pipe("a ring", width=32, height=32, steps=1, seed=1, cfg_normalization=1.0, cfg_truncation=0.5)
    assert [line for line in result.warnings if "has no effect" in line] == [
        "cfg-normalization has no effect: this model's guidance has no such limit",
        "cfg-truncation has no effect: this model's guidance ends by --cfg-end",
    ]
