"""Krea 2 from a prompt to pixels, on both backends, against diffusers' pipeline on folders that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import oracle_krea2, peer
from support.relative import relative

import qwenimg
from qwenimg import Pipeline
from qwenimg.common.families import registry
from qwenimg.common.families.krea2.checkpoint import TAPS
from qwenimg.common.families.krea2.texts import END, TEMPLATE
from qwenimg.common.numbers import noise
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-4  # relative L2 of the final latents; measured at most 5e-6
PIXELS = 2  # of 255: a value on a rounding edge may go either way
CASES = [
    # folder, prompt and negative prompt, width, height, steps, guidance
    ("krea2", "a red circle", "", 80, 48, 4, 3.5),
    ("krea2-turbo", "一个红色的圆在左边", "", 112, 64, 5, 0.0),
    ("krea2", "a star above a ring, 3 hearts; 背景", "a blue square " * 9, 48, 112, 3, 1.5),
    ("krea2", "x " * 600, "", 64, 64, 2, 0.0),  # cut, without guidance
    ("krea2", "a", "a ring", 48, 48, 2, 0.5),
    ("krea2-turbo", "a ring", "", 16, 80, 2, 0.0),
]


@pytest.fixture(scope="module")
def opened() -> dict[tuple[str, str], Pipeline]:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}x{case[4]}-{case[6]}")
@pytest.mark.sample(2)
def test_equals_diffusers(tiny_krea2: dict[str, Path], opened: dict[tuple[str, str], Pipeline], case) -> None:
    name, prompt, negative, width, height, steps, guidance = case
    latents, pixels = oracle_krea2.generate(
        tiny_krea2[name],
        prompt,
        noise.normal((1, 16, height // 8, width // 8), seed=7),
        steps=steps,
        guidance=guidance,
        negative_prompt=negative,
    )
    assert pixels.std() > 10, "a constant picture would prove nothing"
    asked = {"width": width, "height": height, "steps": steps, "guidance": guidance, "seed": 7}
    for backend in BACKENDS:
        if (name, backend) not in opened:
            opened[name, backend] = qwenimg.load(tiny_krea2[name], backend=backend, precision="fp32")
        ours = opened[name, backend](prompt, negative_prompt=negative, **asked)
        peer.check_picture(f"{backend} {width}x{height}", ours, (latents, pixels), LATENTS, PIXELS)


def test_every_input_is_seen(tiny_krea2: dict[str, Path]) -> None:
    """Another prompt, negative prompt or guidance gives another result."""
    with qwenimg.load(tiny_krea2["krea2"], backend="cpu", precision="fp32") as pipe:
        asked = {"width": 48, "height": 48, "steps": 2, "seed": 3}
        calls = [{}, {"negative_prompt": "a blue square"}, {"guidance": 2.0}, {"guidance": 0.0}]
        made = [pipe("a star", **asked, **more).latents for more in calls] + [pipe("a ring", **asked).latents]
    changes = [relative(made[i], made[j]) for i in range(5) for j in range(i)]
    print("changes:", ", ".join(f"{change:.1e}" for change in changes))
    assert min(changes) > 10 * LATENTS


def test_levels() -> None:
    """Golden numbers of diffusers' schedule: the shift of Raw goes with the size, that of Turbo does not."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift

    raw, turbo = (registry.published(registry.catalog.KNOWN[f"krea-2-{name}"]) for name in ("raw", "turbo"))
    assert raw is not None and turbo is not None
    for model, tokens, steps in ((raw, 4096, 8), (raw, 24, 52), (turbo, 4096, 8), (turbo, 16384, 8)):
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        mu = 1.15 if model is turbo else calculate_shift(tokens, 256, 6400, 0.5, 1.15)
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
        ours = flow_schedule(model.checkpoint.scheduler, steps, tokens)
        assert ours == pytest.approx(scheduler.sigmas.tolist(), abs=1e-7)
    golden = (1, 0.9567237, 0.9045308, 0.8403488, 0.7595109, 0.6545668, 0.5128441, 0.3109011, 0)
    assert flow_schedule(turbo.checkpoint.scheduler, 8, 4096) == pytest.approx(golden, abs=5e-8)


def test_prompt(tiny_krea2: dict[str, Path]) -> None:
    """Ids are those of the pipeline without its pads, and cut as there, with the template's end behind all."""
    pipe = oracle_krea2.pipeline(tiny_krea2["krea2"])
    own = registry.open_model(tiny_krea2["krea2"]).checkpoint.tokenizers["text_encoder"].tokenizer
    assert pipe.text_encoder_select_layers == TAPS
    assert (pipe.prompt_template_encode_prefix + "{}", pipe.prompt_template_encode_suffix) == (TEMPLATE.text, END)
    caught = []
    pipe.text_encoder.forward = lambda **given: caught.append(given) or (_ for _ in ()).throw(StopIteration)
    for prompt in ("", "a ring", "背景 don't", "x " * 3000):
        tokens = TEMPLATE.fill(own, prompt)
        with pytest.raises((StopIteration, RuntimeError)):
            pipe.get_text_hidden_states(prompt)
        given = caught.pop()
        assert given["input_ids"][given["attention_mask"]].tolist() == list(tokens.ids) and tokens.pads == 0
        assert (tokens.lost > 0) == (prompt.startswith("x"))
    del pipe.text_encoder.forward


def test_defaults(tiny_krea2: dict[str, Path]) -> None:
    """By what model_index.json says of the folder."""
    for name, steps, guidance in (("krea2", 52, 3.5), ("krea2-turbo", 8, 0.0)):
        with qwenimg.load(tiny_krea2[name], backend="cpu", precision="fp32") as pipe:
            defaults, levels = pipe.defaults, pipe.model.checkpoint.scheduler
        assert (defaults.steps, defaults.guidance, defaults.negative_prompt) == (steps, guidance, "")
        assert (levels.base_shift == levels.max_shift) == (name == "krea2-turbo")
