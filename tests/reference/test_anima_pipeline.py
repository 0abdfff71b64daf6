"""Anima from a prompt to pixels, on both backends, against diffusers' modular pipeline on a folder that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import oracle_anima, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families.anima.texts import LIMIT
from qwenimg.common.numbers import noise
from qwenimg.common.parts import known_configs
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured at most 2e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
CASES = [
    # prompt and negative prompt, width, height, steps, guidance
    ("a red circle", "", 80, 48, 4, 4.0),  # the empty prompt has no token of the text encoder
    ("一个红色的圆在左边", "a blue square " * 9, 112, 64, 5, 1.5),
    ("a star above a ring, 3 hearts; 背景", "", 48, 112, 3, 1.0),  # without guidance
    ("x " * 600, "a ring", 64, 64, 2, 3.0),  # cut
    ("a", "a ring " * 300, 48, 48, 2, 2.5),
    ("a ring", "", 16, 80, 2, 4.0),
]
PICTURE = np.random.default_rng(5).integers(0, 256, (48, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def opened(tiny_anima: Path) -> dict[str, Pipeline]:
    return {name: qwenimg.load(tiny_anima, backend=name, precision="fp32") for name in BACKENDS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[2]}x{case[3]}-{case[5]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_anima: Path, opened: dict[str, Pipeline], case) -> None:
    prompt, negative, width, height, steps, guidance = case
    latents, pixels = oracle_anima.generate(
        tiny_anima,
        prompt,
        noise.normal((1, 16, height // 8, width // 8), seed=7),
        steps=steps,
        guidance=guidance,
        negative_prompt=negative,
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "seed": 7}
    for backend in BACKENDS:
        ours = opened[backend](prompt, negative_prompt=negative, **asked)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_from_a_picture(tiny_anima: Path, opened: dict[str, Pipeline]) -> None:
    """The run starts at the noise level that the strength tells, from the latents of the picture."""
    latents, pixels = oracle_anima.generate(
        tiny_anima,
        "a ring",
        noise.normal((1, 16, 6, 8), seed=7),
        steps=5,
        guidance=3.0,
        image=Image.fromarray(PICTURE),
        strength=0.6,
    )
    asked = {"width": 64, "height": 48, "steps": 5, "guidance": 3.0, "seed": 7, "image": PICTURE, "strength": 0.6}
    for backend in BACKENDS:
        ours = opened[backend]("a ring", **asked)
        peer.check_picture(f"{backend} from a picture", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_input_is_seen(opened: dict[str, Pipeline]) -> None:
    """Another prompt, negative prompt or guidance gives another result."""
    asked = {"width": 48, "height": 48, "steps": 2, "seed": 3}
    calls = [{}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 1.0}]
    pipe = opened["cpu"]
    made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(5) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule, whose shift is the same at every size."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config = known_configs.scheduler("anima")
    golden = (1.0, 0.9, 0.75, 0.5, 0.0)
    assert flow_schedule(config, 4, 4096) == pytest.approx(golden, abs=1e-7)
    for steps in (1, 10, 40):
        theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
        theirs.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        assert flow_schedule(config, steps, 24) == tuple(theirs.sigmas.tolist())


def test_tokens(tiny_anima: Path, opened: dict[str, Pipeline]) -> None:
    """Ids are those of the pipeline, of both tokenizers, cut as there."""
    pipe, texts = oracle_anima.pipeline(tiny_anima), opened["cpu"].model.texts
    step = pipe.blocks.sub_blocks["text_encoder"]
    caught = []
    real = pipe.text_encoder.forward
    pipe.text_encoder.forward = lambda **given: caught.append(given["input_ids"]) or real(**given)
    for prompt in ("", "a ring", "背景 don't </s>", "x " * 3000):
        made = step.encode_prompt(pipe, prompt, prepare_unconditional_embeds=False, device=torch.device("cpu"))
        tokens = texts.fill(prompt)
        assert list(tokens.queries) == made["t5_input_ids"][0].tolist()
        assert (list(tokens.words) or [0]) == caught.pop()[0].tolist()
        assert (tokens.lost > 0) == prompt.startswith("x") and len(tokens.queries) <= LIMIT
    del pipe.text_encoder.forward


def test_defaults(tiny_anima: Path, opened: dict[str, Pipeline]) -> None:
    defaults = opened["cpu"].defaults
    assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (40, 4.0, "")
