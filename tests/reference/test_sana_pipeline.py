"""SANA and SANA-Sprint from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_sana, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.sana.texts import INSTRUCTION, instructed, plain
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling import flow_solvers
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(5).integers(0, 256, (96, 160, 3), np.uint8)
HOLE = np.zeros((96, 160), np.uint8)
HOLE[:, 64:] = 255
CASES: list[tuple[Any, ...]] = [
    # prompt, negative prompt, width, height, steps, guidance
    ("a red circle", "", 160, 96, 4, 4.5),
    (" 一个红色的圆在左边 ", "A blue square " * 9, 224, 64, 5, 1.5),
    ("A star above a ring, 3 hearts; 背景", "", 96, 224, 3, 1.0),  # without guidance
    ("x y " * 300, "a ring", 96, 96, 2, 3.0),  # cut
    ("a", "a ring " * 300, 96, 96, 1, 2.5),
    ("a ring", "low", 160, 160, 16, 4.5),  # as many steps as have a last one of second order elsewhere
]


@pytest.fixture(scope="module")
def opened(tiny_sana: dict[str, Path]) -> dict[str, dict[str, Pipeline]]:
    return {
        kind: {name: qwenimg.load(folder, backend=name, precision="fp32") for name in BACKENDS}
        for kind, folder in tiny_sana.items()
    }


def check(folder: Path, opened: dict[str, Pipeline], case: tuple[Any, ...]) -> None:
    prompt, negative, width, height, steps, guidance = case
    start = noise.normal((1, 8, height // 32, width // 32), seed=7)
    asked = {"steps": steps, "guidance": guidance, "negative_prompt": negative}
    expected = oracle_sana.generate(folder, latents=start, prompt=prompt, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[backend](prompt, width=width, height=height, seed=7, **asked)
        peer.check_picture(f"{backend} {width}x{height}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[4]}-{case[5]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]], case: Any) -> None:
    check(tiny_sana["sana"], opened["sana"], case)


@pytest.mark.parametrize("kind", ["sana-1.0", "sana-2k"])
def test_other_models_equal_diffusers(
    tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]], kind: str
) -> None:
    check(tiny_sana[kind], opened[kind], CASES[0])


@pytest.mark.parametrize(("steps", "guidance"), [(1, 4.5), (2, 4.5), (2, 1.0), (3, 7.0), (4, 4.5)])
def test_sprint_equals_diffusers(
    tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]], steps: int, guidance: float
) -> None:
    asked: dict[str, Any] = {"width": 160, "height": 96, "steps": steps, "guidance": guidance, "seed": 3}
    expected = oracle_sana.sprint(tiny_sana["sana-sprint"], "A red Circle", **asked)
    assert expected[1].std() > 10
    for backend in BACKENDS:
        made = opened["sana-sprint"][backend]("A red Circle", **asked)
        peer.check_picture(f"{backend} {steps} steps, guidance {guidance}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (4, 0.75)])
def test_from_a_picture(
    tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]], steps: int, strength: float
) -> None:
    """And a mask, outside of which the latents stay those of the picture, whatever the prompt."""
    asked = {"steps": steps, "strength": strength, "guidance": 3.0, "negative_prompt": "blurry", "seed": 7}
    expected = oracle_sana.from_picture(tiny_sana["sana"], "a ring", PICTURE, **asked)
    for backend in BACKENDS:
        made = opened["sana"][backend]("a ring", image=PICTURE, width=160, height=96, **asked)
        peer.check_picture(f"{backend} {strength}", made, expected, LATENTS, PIXELS)
        first, second = (
            opened["sana"][backend](prompt, image=PICTURE, mask=HOLE, width=160, height=96, **asked).latents
            for prompt in ("a ring", "a star")
        )
        assert np.array_equal(first[..., :2], second[..., :2]) and relative(first[..., 2:], second[..., 2:]) > 0.01


def test_every_input_is_seen(opened: dict[str, dict[str, Pipeline]]) -> None:
    """Another prompt, negative prompt or guidance gives another result."""
    asked = {"width": 96, "height": 96, "steps": 3, "seed": 3}
    calls: list[dict[str, Any]] = [{}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0},
                                   {"cfg_end": 0.5}, {"sampler": "euler"}]  # fmt: skip
    pipe = opened["sana"]["cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    sprint = opened["sana-sprint"]["cpu"]
    asked["steps"] = 2
    made_by_sprint = [
        sprint("a star", **asked, **more).latents for more in ({}, {"guidance": 2.0}, {"true_cfg": 2.0})
    ] + [sprint("a ring", **asked).latents]
    for all_made in (made, made_by_sprint):
        changes = [relative(all_made[i], all_made[j]) for i in range(len(all_made)) for j in range(i)]
        print("changes:", ", ".join(f"{change:.1e}" for change in changes))
        assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Levels and times of DPM-Solver++ with flow sigmas, for every number of steps; those of SCM are fewer."""
    from diffusers import DPMSolverMultistepScheduler, SCMScheduler
    from support.tiny_sana import DPM

    config = known_configs.scheduler("sana-1.5")
    rule = flow_solvers.levels(config)
    for steps in range(1, 101):
        theirs = DPMSolverMultistepScheduler(**DPM)
        theirs.set_timesteps(steps)
        levels = flow_schedule(config, steps, 24, rule)
        assert levels == tuple(theirs.sigmas.tolist())
        assert [config.timestep(level) for level in levels[:-1]] == theirs.timesteps.tolist()
    config = known_configs.scheduler("sana-sprint")
    rule = flow_solvers.levels(config)
    for steps in (1, 2, 3, 4):
        scm = SCMScheduler()
        scm.set_timesteps(steps, intermediate_timesteps=1.3 if steps == 2 else None)
        t = scm.timesteps.numpy()[:-1]
        expected = np.sin(t) / (np.cos(t) + np.sin(t))
        assert np.abs(np.array(flow_schedule(config, steps, 24, rule))[:-1] - expected).max() < 1e-6


@pytest.mark.parametrize("change", [{"solver_order": 3}, {"prediction_type": "epsilon"}, {"use_karras_sigmas": True}])
def test_schedulers_that_are_refused(change: dict[str, Any]) -> None:
    from support.tiny_sana import DPM

    with pytest.raises(ModelError, match=next(iter(change))):
        flow_solvers.read_config({"_class_name": flow_solvers.DPM, **DPM, **change}, Path("s.json"))


def test_tokens(tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]]) -> None:
    """Ids and the states that are taken are those of the pipeline."""
    pipe, texts = oracle_sana.pipeline(tiny_sana["sana"]), opened["sana"]["cpu"].model.texts
    whole = len(pipe.tokenizer.encode(INSTRUCTION))
    for prompt in ("", "a ring", "背景 don't, é\n", " x  Y", "x " * 3000):
        for text, limit in ((instructed(prompt), whole + 298), (plain(prompt), 300)):
            theirs = pipe.tokenizer(text, max_length=limit, truncation=True).input_ids
            tokens = texts.fill(text)
            assert list(tokens.ids) == theirs and tokens.ids[0] == pipe.tokenizer.bos_token_id
            assert (tokens.lost > 0) == prompt.startswith("x ") and texts.lengths([text], True)[0] <= 300
        kept = [0, *range(whole - 1, len(texts.fill(instructed(prompt)).ids))]
        assert len(kept) == texts.lengths([instructed(prompt)], True)[0]


@torch.inference_mode()
def test_states(tiny_sana: dict[str, Path], opened: dict[str, dict[str, Pipeline]]) -> None:
    """The states that its pipeline encodes and selects, without those of padding."""
    pipe = oracle_sana.pipeline(tiny_sana["sana"])
    import inspect

    lines = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
    assert "\n".join(lines) == INSTRUCTION
    states, mask, *_ = pipe.encode_prompt("A ring", False, complex_human_instruction=lines)
    for backend in BACKENDS:
        texts = opened["sana"][backend].model.texts
        [[made]] = texts.arrays([instructed("A ring")])
        error = relative(made, states[:, mask[0].bool()].numpy())
        print(f"{backend}: {error:.1e}")
        assert error < 1e-5


def test_defaults(opened: dict[str, dict[str, Pipeline]]) -> None:
    defaults, sprint = opened["sana"]["cpu"].defaults, opened["sana-sprint"]["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.negative_prompt, defaults.width) == (20, 4.5, "", 1024)
    assert (sprint.steps, sprint.guidance) == (2, 4.5)
