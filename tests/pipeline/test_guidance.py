"""Guidance as data: families of other formulas, of a third branch, of a number that the model itself is told, and of
two numbers at once fit into it, and what they draw is what their formula says of the network's predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.toy_family import SCALE, ToyModel, add_toy, letters, write_toy

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.numbers.latent_shape import LatentShape
from qwenimg.common.numbers.noise import normal
from qwenimg.common.pipeline.steps.guidance import Branch, Guidance, cfg
from qwenimg.common.pipeline.steps.plan import SamplingPlan, Segment
from qwenimg.common.request.request import Request, request_of
from qwenimg.common.sampling import table
from qwenimg.common.sampling.types import Schedule

ASKED: dict[str, Any] = {"width": 32, "height": 24, "steps": 4, "seed": 7, "negative_prompt": "dull"}
PROMPT = "a red circle"
BACKENDS = ("cpu", "mlx")
SKIP = 2.8  # scale of skip-layer guidance, and its share of the steps
SKIPPED = (0.25, 0.75)
LETTERS = 5  # what the third branch sees of the prompt: the toy has no layers to skip


def from_the_prompt(engine: Any, request: Request, predictions: Sequence[Any]) -> Any:
    """pos + s (pos - neg)"""
    conditional, unconditional = predictions
    return conditional + request.guidance * (conditional - unconditional)


def with_skipped(engine: Any, request: Request, predictions: Sequence[Any]) -> Any:
    """neg + s (pos - neg) + 2.8 (pos - skipped), the last one as long as there is a third branch."""
    guided = cfg(engine, request, predictions[:2])
    return guided + SKIP * (predictions[0] - predictions[2]) if len(predictions) == 3 else guided


def skipped(request: Request) -> tuple[Branch, ...]:
    return (Branch(prompt=request.prompt, steps=SKIPPED, options={"letters": LETTERS}),)


# What a family would have in its row, and the noise-free prediction that its step takes by hand
FROM_THE_PROMPT = Guidance(formula=from_the_prompt, off=0.0)
WITH_SKIPPED = Guidance(formula=with_skipped, more=skipped)
EMBEDDED = Guidance(formula=cfg, off=float("inf"))
TWO_NUMBERS = Guidance(formula=cfg, scale=lambda request: request.family_options.guidance_rescale, off=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(params=BACKENDS)
def load(
    request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Guidance], Pipeline]:
    add_toy(monkeypatch, tmp_path / "networks")

    def opened(guidance: Guidance) -> Pipeline:
        monkeypatch.setattr(ToyModel, "guidance", guidance)
        return qwenimg.load(folder, backend=str(request.param), precision="fp32")

    return opened


def by_hand(pipe: Pipeline, predicted: Callable[[Callable[..., Any], int, float], Any], **asked: Any) -> np.ndarray:
    """Euler steps by the network alone: `predicted` gives the velocity from calls of it, the step and the scale."""
    request = pipe.check(PROMPT, **(ASKED | asked))
    plan, model = pipe.model.plan(request), pipe.model
    network, _ = model.residents.acquire(model.stages(request, plan, LatentShape(1, 24 // SCALE, 32 // SCALE))[0])
    noise = normal((1, 3, 24 // SCALE, 32 // SCALE), seed=7)
    x = pipe.engine.array(np.ascontiguousarray(noise.reshape(1, 3, -1).swapaxes(1, 2)))
    for i, (sigma, following) in enumerate(zip(plan.sigmas, plan.sigmas[1:], strict=False)):

        def call(prompt: str, seen: int = 26, x: Any = x) -> Any:
            text = letters(prompt)
            text[..., seen:] = 0
            return network.predict(x, None, text)

        x = x + (following - sigma) * predicted(call, i, request.guidance)
    return pipe.engine.numpy(x).swapaxes(1, 2).reshape(noise.shape)


def check(pipe: Pipeline, predicted: Callable[[Callable[..., Any], int, float], Any], **asked: Any) -> None:
    expected, latents = by_hand(pipe, predicted, **asked), pipe(PROMPT, **(ASKED | asked)).latents
    error = float(np.abs(latents - expected).max() / np.abs(expected).max())
    print(f"{error:.1e}")
    assert error < 1e-5  # sampler: x - sigma v first, then the direction from it; 4e-7 measured


def test_a_formula_that_starts_from_the_prompt(load: Callable[[Guidance], Pipeline]) -> None:
    """On for every scale above 0; 1 is the guidance that others call 2."""
    with closing(load(FROM_THE_PROMPT)) as pipe:
        for scale in (1.0, 0.5):
            check(pipe, lambda call, i, s: call(PROMPT) + s * (call(PROMPT) - call("dull")), guidance=scale)
        check(pipe, lambda call, i, s: call(PROMPT), guidance=0.0)
        assert pipe(PROMPT, **ASKED, guidance=0.5).recipe["negative_prompt"] == "dull"
        assert pipe(PROMPT, **ASKED, guidance=0.0).recipe["negative_prompt"] == ""


def test_a_third_branch_for_some_steps(load: Callable[[Guidance], Pipeline]) -> None:
    """Of four steps the second and the third have it; guidance ends one step before the last."""

    def predicted(call: Callable[..., Any], i: int, s: float) -> Any:
        if i == 3:
            return call(PROMPT)
        guided = call("dull") + s * (call(PROMPT) - call("dull"))
        return guided + SKIP * (call(PROMPT) - call(PROMPT, LETTERS)) if i in (1, 2) else guided

    with closing(load(WITH_SKIPPED)) as pipe:
        check(pipe, predicted, guidance=3.0, cfg_end=0.75)


def test_a_number_that_the_model_is_told_makes_no_branch(load: Callable[[Guidance], Pipeline]) -> None:
    with closing(load(EMBEDDED)) as pipe:
        check(pipe, lambda call, i, s: call(PROMPT), guidance=3.5)
        warnings = pipe(PROMPT, **ASKED, guidance=3.5).warnings
        assert any("negative prompt has no effect" in line for line in warnings)


def test_the_scale_may_be_another_number() -> None:
    """As of a model that is told one number and has a scale of its own for the unconditional branch."""
    told = {"prompt": "x", "guidance": 3.5}
    assert len(TWO_NUMBERS.branches(Request(**told))) == 1
    assert len(TWO_NUMBERS.branches(request_of(told | {"guidance_rescale": 0.7}))) == 2


def test_stretches_of_the_steps() -> None:
    sigmas = (8.0, 4.0, 2.0, 1.0, 0.0)
    segment = Segment(schedule=Schedule(sigmas=sigmas), solver=table.find("euler").function)
    plan = SamplingPlan(sampler="euler", schedule="model", segments=(segment,))

    def stretches(*shares: tuple[float, float]) -> list[tuple[float, list[int]]]:
        return plan.stretches([Branch(prompt=""), *(Branch(prompt="", steps=steps) for steps in shares)])

    assert stretches() == [(-1.0, [0])]
    assert stretches((0.0, 1.0)) == [(-1.0, [0, 1])]
    assert stretches((0.0, 0.5)) == [(2.0, [0, 1]), (-1.0, [0])]
    assert stretches((0.0, 0.5), (0.25, 0.75)) == [(4.0, [0, 1]), (2.0, [0, 1, 2]), (1.0, [0, 2]), (-1.0, [0])]


def test_passes_of_a_run() -> None:
    """Whole steps, and evaluations by their noise levels: Heun's second one in a step is at the end of it."""
    branches = [Branch(prompt=""), Branch(prompt="", steps=(0.0, 0.5)), Branch(prompt="", steps=(0.25, 0.5))]

    def counted(sampler: str, *sigmas: tuple[float, ...]) -> SamplingPlan:
        solver = table.find(sampler).function
        segments = tuple(Segment(schedule=Schedule(sigmas=one), solver=solver) for one in sigmas)
        return SamplingPlan(sampler=sampler, schedule="model", segments=segments)

    plan = counted("euler", (8.0, 4.0, 2.0, 1.0, 0.0))
    assert [plan.passes(branches, size) for size in (3, 2, 1)] == [4, 5, 7]
    assert counted("euler", (8.0, 4.0, 2.0, 0.0)).passes(branches) == 3 + 2 + 1  # half of three steps are two
    assert counted("heun", (8.0, 4.0, 2.0, 1.0, 0.0)).passes(branches[:2]) == 7 + 3
    parts = counted("euler", (8.0, 4.0, 2.0), (2.0, 1.0, 0.0))
    assert [parts.passes(branches[:2], 1, segment) for segment in (0, 1, None)] == [4, 2, 6]
