"""ERNIE-Image from a prompt to pixels, on both backends, against diffusers' pipeline on folders that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import oracle_ernie, peer
from support.relative import relative
from support.tiny_ernie import LIMIT

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families import registry
from qwenimg.common.families.ernie.checkpoint import VARIANCE_EPS
from qwenimg.common.families.ernie.texts import PROMPT
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured at most 5e-7
PIXELS = 2  # of 255: a value on a rounding edge may go either way
CASES = [
    # folder, prompt and negative prompt, width, height, steps, guidance
    ("ernie", "a red circle", "", 80, 48, 4, 4.0),
    ("ernie", "a star above a ring, 3 hearts; 背景", "a blue square " * 9, 48, 112, 3, 2.5),
    ("ernie", "x " * 90, "", 64, 64, 2, 1.0),  # without guidance
    ("ernie", "a", "a ring", 48, 48, 2, 4.0),
    ("ernie-turbo", "一个红色的圆在左边", "", 112, 64, 5, 1.0),
    ("ernie-turbo", "a ring", "", 16, 80, 2, 3.0),  # its tokenizer makes no token of the empty prompt
]


@pytest.fixture(scope="module")
def opened() -> dict[tuple[str, str], Pipeline]:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}x{case[4]}-{case[6]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_ernie: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case) -> None:
    name, prompt, negative, width, height, steps, guidance = case
    latents, pixels = oracle_ernie.generate(
        tiny_ernie[name],
        prompt,
        noise.normal((1, 32, height // 16, width // 16), seed=7),
        steps=steps,
        guidance=guidance,
        negative_prompt=negative,
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "seed": 7}
    for backend in BACKENDS:
        if (name, backend) not in opened:
            opened[name, backend] = qwenimg.load(tiny_ernie[name], backend=backend, precision="fp32")
        ours = opened[name, backend](prompt, negative_prompt=negative, **asked)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_input_is_seen(tiny_ernie: dict[str, Path]) -> None:
    """Another prompt, negative prompt or guidance gives another result."""
    with qwenimg.load(tiny_ernie["ernie"], backend="cpu", precision="fp32") as pipe:
        asked = {"width": 48, "height": 48, "steps": 2, "seed": 3}
        calls = [{}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}]
        made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(5) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule, whose shift is the same at every size."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    for model in ("ernie-image", "ernie-image-turbo"):
        config = known_configs.scheduler(model)
        golden = (1, 0.96551724, 0.92307692, 0.86956522, 0.8, 0.70588235, 0.57142857, 0.36363636, 0)
        assert flow_schedule(config, 8, 4096) == pytest.approx(golden, abs=5e-8)
        theirs = FlowMatchEulerDiscreteScheduler(shift=4.0)
        theirs.set_timesteps(sigmas=np.linspace(1, 0, 51)[:-1])
        assert flow_schedule(config, 50, 24) == pytest.approx(theirs.sigmas.tolist(), abs=1e-7)


@pytest.mark.parametrize("name", ["ernie", "ernie-turbo"])
def test_prompt(name: str, tiny_ernie: dict[str, Path]) -> None:
    """Ids are those of the pipeline, with what the tokenizer's file has before a text, and cut as there."""
    theirs = oracle_ernie.pipeline(tiny_ernie[name]).tokenizer
    own = registry.open_model(tiny_ernie[name]).checkpoint.tokenizers["text_encoder"].tokenizer
    assert own.before == (("<s>",) if name == "ernie" else ())
    for prompt in ("", "a ring", '背景 {"a": [1, 2]} don\'t', "x " * 3000):
        ids, tokens = theirs(prompt, truncation=True)["input_ids"] or [theirs.bos_token_id], PROMPT.fill(own, prompt)
        assert list(tokens.ids) == ids and len(ids) <= LIMIT and tokens.pads == 0
        assert (tokens.lost > 0) == (len(ids) == LIMIT)


def test_defaults(tiny_ernie: dict[str, Path]) -> None:
    """By the folder's name: nothing in it tells Turbo from the model that it is distilled from."""
    for name, steps, guidance in (("ernie", 50, 4.0), ("ernie-turbo", 8, 1.0)):
        with qwenimg.load(tiny_ernie[name], backend="cpu", precision="fp32") as pipe:
            defaults, config = pipe.defaults, pipe.model.checkpoint["vae"].config
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")
        assert config.batch_norm_eps == VARIANCE_EPS
