"""Lumina-Image 2.0 from a prompt to pixels, on both backends, against diffusers on a folder that it wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_lumina, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.base.errors import UsageError
from qwenimg.common.families.lumina.model import _guided
from qwenimg.common.families.lumina.texts import INSTRUCTION, START, TEXT
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
PICTURE = np.random.default_rng(5).integers(0, 256, (48, 80, 3), np.uint8)
HOLE = np.zeros((48, 80), np.uint8)
HOLE[:, 32:] = 255
CASES: list[tuple[Any, ...]] = [
    # prompt, negative prompt, width, height, steps, guidance, options there and here
    ("a red circle", "", 80, 48, 4, 4.0, {}, {}),
    ("一个红色的圆在左边", "a blue square " * 9, 112, 64, 5, 1.5, {}, {}),
    ("a star above a ring, 3 hearts; 背景", "", 48, 112, 3, 1.0, {}, {}),  # without guidance
    ("x y " * 300, "a ring", 64, 64, 2, 3.0, {}, {}),  # cut
    ("a", "a ring " * 300, 48, 48, 2, 2.5, {}, {}),
    ("a ring", "", 16, 80, 8, 4.0, {"cfg_trunc_ratio": 0.25}, {"cfg_end": 0.25}),
    # a limit that is never reached
    ("a ring", "low", 64, 48, 4, 4.0, {"cfg_normalization": False}, {"cfg_normalization": 100.0}),
    # an instruction of the prompt's own
    (f"You draw. {START} a ring", "", 48, 64, 3, 2.0, {"prompt": "a ring", "system_prompt": "You draw."}, {}),
]


@pytest.fixture(scope="module")
def opened(tiny_lumina: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_lumina, backend=name, precision="fp32") for name in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[5]}-{len(case[6])}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_lumina: Path, opened: dict[str, Pipeline], case: Any) -> None:
    prompt, negative, width, height, steps, guidance, theirs, ours = case
    start = noise.normal((1, 16, height // 8, width // 8), seed=7)
    asked = {"steps": steps, "guidance": guidance, "negative_prompt": negative}
    expected = oracle_lumina.generate(tiny_lumina, latents=start, **({"prompt": prompt} | asked | theirs))
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        made = opened[backend](prompt, width=width, height=height, seed=7, **asked, **ours)
        peer.check_picture(f"{backend} {width}x{height}", made, expected, LATENTS, PIXELS)


@pytest.mark.parametrize(("steps", "strength"), [(5, 0.6), (4, 0.75)])
@torch.inference_mode()
def test_from_a_picture(tiny_lumina: Path, opened: dict[str, Pipeline], steps: int, strength: float) -> None:
    """And a mask, outside of which the latents stay those of the picture, whatever the prompt."""
    asked = {"steps": steps, "strength": strength, "guidance": 3.0, "negative_prompt": "blurry", "seed": 7}
    expected = oracle_lumina.from_picture(tiny_lumina, "a ring", PICTURE, **asked)
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
    """Another prompt, negative prompt, guidance, or way of guidance gives another result."""
    asked = {"width": 48, "height": 48, "steps": 3, "seed": 3}
    calls: list[dict[str, Any]] = [
        {}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}, {"cfg_end": 0.5},
        {"cfg_normalization": 0.7}, {"cfg_normalization": 100.0},
    ]  # fmt: skip
    pipe = opened["cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(len(made)) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_limit_is_of_the_whole_prediction(opened: dict[str, Pipeline], backend: str) -> None:
    """As in the code of the model's authors, in float64."""
    engine, (first, second) = opened[backend].engine, np.random.default_rng(1).standard_normal((2, 1, 16, 4, 6))
    request = SimpleNamespace(guidance=4.0, family_options=SimpleNamespace(cfg_normalization=0.8))
    made = _guided(engine, request, [engine.array(one.astype(np.float32)) for one in (first, second)])  # type: ignore[arg-type]
    plain = second + 4.0 * (first - second)
    expected = plain * min(1.0, 0.8 * np.linalg.norm(first) / np.linalg.norm(plain))
    assert relative(np.asarray(engine.numpy(made)), expected) < 1e-6 < relative(plain, expected)


def test_levels() -> None:
    """Golden numbers of diffusers' schedule, whose shift is the same at every size."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = known_configs.scheduler("lumina")
    golden = (1.0, 0.947368, 0.857143, 0.666667, 0.0)
    assert flow_schedule(config, 4, 4096) == pytest.approx(golden, abs=1e-6)
    for steps in (1, 10, 50):
        theirs = FlowMatchEulerDiscreteScheduler(shift=6.0)
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        assert flow_schedule(config, steps, 24) == tuple(theirs.sigmas.tolist())


def test_tokens(tiny_lumina: Path, opened: dict[str, Pipeline]) -> None:
    """Ids are those of the pipeline, with its first token and cut as there."""
    pipe, texts = oracle_lumina.pipeline(tiny_lumina), opened["cpu"].model.texts
    for prompt in ("", "a ring", f"{INSTRUCTION} {START} 背景 don't, é\n", " x  y", "x " * 3000):
        theirs = pipe.tokenizer(prompt, max_length=256, truncation=True).input_ids
        tokens = texts.fill(prompt)
        assert list(tokens.ids) == theirs and tokens.ids[0] == pipe.tokenizer.bos_token_id
        assert (tokens.lost > 0) == prompt.startswith("x") and len(tokens.ids) <= TEXT.limit


def test_instruction(tiny_lumina: Path) -> None:
    assert oracle_lumina.pipeline(tiny_lumina).system_prompt == INSTRUCTION


def test_defaults(tiny_lumina: Path, opened: dict[str, Pipeline]) -> None:
    defaults = opened["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (50, 4.0, "")


def test_float16_is_refused_with_the_reason(tiny_lumina: Path) -> None:
    with pytest.raises(UsageError, match="bfloat16 and float32"):
        qwenimg.load(tiny_lumina, backend="cpu", precision="fp16")
