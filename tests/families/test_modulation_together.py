"""Prompts that are announced together make their modulation together: its weights, a quarter of FLUX.1 and a third of
Stable Diffusion 3.5, are read once for all of them, and each picture is the same as alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crossed import crossed
from support.family_cases import BACKENDS

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.jobs import run as jobs
from qwenimg.common.jobs.job import Inputs, Job
from qwenimg.common.parts import modulations
from qwenimg.common.pipeline import fit_options
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights import values
from qwenimg.common.weights.plan import Entry

KINDS = ("flux-dev", "sd3")
PROMPTS = ("a red circle", "a star", "two dogs", "a long and winding road", "x")
ASKED: dict[str, Any] = {"width": 48, "height": 32, "steps": 2, "seed": 3}
NEGATIVE: dict[str, dict[str, Any]] = {
    "flux-dev": {"negative_prompt": "blurry", "true_cfg": 2.0},
    "sd3": {"negative_prompt": "blurry", "guidance": 3.0},
}


@contextmanager
def counted(pipe: Pipeline, backend: str) -> Iterator[Counter[str]]:
    """How often each weight of the modulation is read."""
    plan: Any = pipe.model.checkpoint["transformer"].plan  # type: ignore[attr-defined]
    names = {id(entry.source): name for name, entry in plan.entries.items() if entry.residency is ONCE}
    assert names
    reads: Counter[str] = Counter()
    read = values.read_finite

    def noted(entry: Entry) -> Any:
        if (name := names.get(id(entry.source))) is not None:
            reads[name] += 1
        return read(entry)

    package = {"cpu": "torch", "mlx": "mlx"}[backend]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"qwenimg.backends.{package}.load.read_finite", noted)
        yield reads


def times(reads: Counter[str]) -> int:
    """How often all of them were read."""
    [count] = set(reads.values())
    return count


@pytest.mark.parametrize(("kind", "backend"), crossed(KINDS, BACKENDS))
@pytest.mark.sample(0)
def test_the_weights_are_read_once_for_all_announced_prompts(tiny: dict[str, Path], kind: str, backend: str) -> None:
    asked = ASKED | NEGATIVE[kind]
    with qwenimg.load(tiny[kind], backend, "fp32") as pipe, counted(pipe, backend) as alone:
        expected = [pipe(prompt, **asked).latents for prompt in PROMPTS]
    with qwenimg.load(tiny[kind], backend, "fp32") as pipe, counted(pipe, backend) as together:
        pipe.prepare([*PROMPTS, "blurry"])
        made = [pipe(prompt, **asked).latents for prompt in PROMPTS]
        again = [pipe(prompt, **asked).latents for prompt in PROMPTS[::-1]]
    print(f"{kind} on {backend}: {times(alone)} and {times(together)} reads of {len(together)} weights")
    assert (times(alone), times(together)) == (len(PROMPTS), 1)
    assert all(map(np.array_equal, made, expected)) and all(map(np.array_equal, again, expected[::-1]))


@pytest.mark.sample(0)
def test_as_many_as_the_bytes_allow(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts at a time: three reads for five. Another schedule or guidance is another modulation."""
    with qwenimg.load(tiny["flux-dev"], "cpu", "fp32") as pipe:
        request = pipe.check(PROMPTS[0], **ASKED)
        model: Any = pipe.model
        stages = model.steps(request, model.plan(request), fit_options.start.latent_shape(model, request), [8])
        monkeypatch.setattr(modulations, "TOGETHER", 2 * stages[0].splits[-1].results + 1)
        with counted(pipe, "cpu") as reads:
            pipe.prepare(PROMPTS)
            for prompt in PROMPTS:
                pipe(prompt, **ASKED)
            assert times(reads) == 3
            pipe(PROMPTS[0], **ASKED, guidance=2.0)
            pipe(PROMPTS[0], **(ASKED | {"steps": 3}))
            assert times(reads) == 5


def test_a_run_that_streams_or_has_little_memory_makes_its_own(tiny: dict[str, Path]) -> None:
    with qwenimg.load(tiny["flux-dev"], "cpu", "fp32", max_memory=2**40) as pipe:
        pipe.prepare(PROMPTS)
        request = pipe.check(PROMPTS[0], **ASKED)
        model: Any = pipe.model
        shape = fit_options.start.latent_shape(model, request)
        stages = model.steps(request, model.plan(request), shape, [8])
        assert [split.size for split in stages[0].splits] == [1]
    with qwenimg.load(tiny["flux-dev"], "cpu", "fp32") as pipe:
        pipe.prepare(PROMPTS)
        model = pipe.model
        stages = model.steps(request, model.plan(request), shape, [8])
        assert [split.size for split in stages[0].splits] == [5, 2, 1]
        needed = [split.needed + model.runtime.weight_bytes(stages[0].component) for split in stages[0].splits]
        for size, room in ((5, needed[0]), (2, needed[1]), (1, needed[2])):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(model.runtime), "budget", lambda self, loaded, room=room: room)
                plan = model.residents.plan(stages[:1])
                assert plan.stages[0].activations == stages[0].splits[(5, 2, 1).index(size)].activations


@pytest.mark.parametrize(
    ("options", "expected"), [({}, ["x"]), ({"true_cfg": 1.0}, ["x"]), ({"true_cfg": 2.0}, ["x", "blurry"])]
)
def test_a_negative_prompt_is_announced_where_it_is_used(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, float], expected: list[str]
) -> None:
    """In FLUX.1 by the scale of true CFG, not by the guidance that the model is told."""
    announced = list[str]()
    monkeypatch.setattr(Pipeline, "prepare", lambda self, texts, *rest, **more: announced.extend(texts))
    asked: dict[str, Any] = {"prompt": "x", "guidance": 3.5, "negative_prompt": "blurry"}
    with qwenimg.load(tiny["flux-dev"], "cpu", "fp32") as pipe:
        jobs.prepare(pipe, [Job(options=asked | options, seeds=(1,))], Inputs())
    assert announced == expected
