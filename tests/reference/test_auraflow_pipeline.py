"""AuraFlow from a prompt to pixels, on both backends, against diffusers on a folder that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_auraflow, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.auraflow.texts import LENGTH
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import SHIFTED_TWICE, flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(5).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
CASES: list[tuple[Any, ...]] = [
    # prompt, negative prompt, width, height, steps, guidance
    ("a red circle", "", 80, 48, 4, 3.5),
    ("一个红色的圆在左边", "a blue square " * 9, 112, 64, 5, 1.5),
    ("a star above a ring, 3 hearts; 背景", "", 48, 112, 3, 1.0),  # without guidance
    ("x y " * 300, "a ring", 64, 64, 2, 3.0),  # cut
    ("a", "a ring " * 300, 48, 48, 2, 2.5),
    ("a ring", "low quality", 16, 224, 3, 2.0),  # as wide as the table
]


@pytest.fixture(scope="module")
def opened(tiny_auraflow: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_auraflow, backend=name, precision="fp32") for name in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[5]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_auraflow: Path, opened: dict[str, Pipeline], case: Any) -> None:
    prompt, negative, width, height, steps, guidance = case
    start = noise.normal((1, 4, height // 8, width // 8), seed=7)
    asked = {"steps": steps, "guidance": guidance, "negative_prompt": negative}
    expected = oracle_auraflow.generate(tiny_auraflow, prompt, start, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[backend](prompt, width=width, height=height, seed=7, **asked)
        peer.check_picture(f"{backend} {width}x{height}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (4, 0.75)])
def test_from_a_picture(tiny_auraflow: Path, opened: dict[str, Pipeline], steps: int, strength: float) -> None:
    """And a mask, outside of which the latents stay those of the picture, whatever the prompt."""
    asked = {"steps": steps, "strength": strength, "guidance": 3.0, "negative_prompt": "blurry", "seed": 7}
    expected = oracle_auraflow.from_picture(tiny_auraflow, "a ring", PICTURE, **asked)
    for backend in BACKENDS:
        made = opened[backend]("a ring", image=PICTURE, width=80, height=48, **asked)
        peer.check_picture(f"{backend} {strength}", made, expected, LATENTS, PIXELS)
    drawn = [
        opened["cpu"](prompt, image=PICTURE, mask=HOLE, width=80, height=48, **asked).latents
        for prompt in ("a ring", "a star")
    ]
    assert (
        np.array_equal(drawn[0][..., :4], drawn[1][..., :4]) and relative(drawn[0][..., 4:], drawn[1][..., 4:]) > 0.01
    )


def test_every_input_is_seen(opened: dict[str, Pipeline]) -> None:
    """Another prompt, negative prompt or guidance gives another result."""
    asked = {"width": 48, "height": 48, "steps": 3, "seed": 3}
    calls: list[dict[str, Any]] = [
        {}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}, {"cfg_end": 0.2},
    ]  # fmt: skip
    pipe = opened["cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule, which is shifted twice, the same at every size."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = known_configs.scheduler("auraflow")
    assert config.shift == 1.73
    for steps in (1, 10, 50):
        theirs = FlowMatchEulerDiscreteScheduler(shift=1.73)
        theirs.set_timesteps(steps)
        assert flow_schedule(config, steps, 24, SHIFTED_TWICE) == tuple(theirs.sigmas.tolist())


def test_tokens(tiny_auraflow: Path, opened: dict[str, Pipeline]) -> None:
    """Ids are those of the pipeline, with its last token and cut as there."""
    pipe, texts = oracle_auraflow.pipeline(tiny_auraflow), opened["cpu"].model.texts
    for prompt in ("", "a ring", "背景 don't, é\n", " x  y", "  two", "<table>x", "x " * 3000):
        theirs = pipe.tokenizer(prompt, max_length=LENGTH, truncation=True).input_ids
        tokens = texts.fill(prompt)
        assert list(tokens.ids) == theirs and tokens.ids[-1] == pipe.tokenizer.eos_token_id, prompt
        assert (tokens.lost > 0) == prompt.startswith("x ") and len(tokens.ids) <= LENGTH
    assert "255 tokens" in texts.cut("x " * 3000) and not texts.cut("a ring")


def test_states_of_pads_are_zeros(tiny_auraflow: Path, opened: dict[str, Pipeline]) -> None:
    pipe, texts = oracle_auraflow.pipeline(tiny_auraflow), opened["cpu"].model.texts
    theirs = pipe.encode_prompt("a ring", do_classifier_free_guidance=False)[0].detach().numpy()
    [[ours]] = texts.arrays(["a ring"])
    count = len(texts.fill("a ring").ids)
    assert ours.shape == theirs.shape == (1, LENGTH, 60) and not ours[:, count:].any() and not theirs[:, count:].any()
    assert relative(ours, theirs) < 1e-5


def test_defaults(tiny_auraflow: Path, opened: dict[str, Pipeline]) -> None:
    defaults = opened["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (50, 3.5, "")


def test_an_image_larger_than_the_table_is_refused(opened: dict[str, Pipeline]) -> None:
    with pytest.raises(UsageError, match="larger than this model's 14 a side"):
        opened["cpu"]("a ring", width=240, height=64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_draws(tiny_auraflow: Path, opened: dict[str, Pipeline], backend: str) -> None:
    """The published weights are in float16: the policy draws what float32 draws, but for its roundings."""
    asked = {"width": 48, "height": 48, "steps": 2, "seed": 3, "guidance": 2.0}
    made = qwenimg.load(tiny_auraflow, backend=backend, precision="fp16")("a star", **asked)
    error = relative(made.latents, opened[backend]("a star", **asked).latents)
    print(f"{backend} in float16: {error:.1e}")
    assert error < 0.02  # of a tiny model
