"""Ovis-Image from a prompt to pixels, on both backends, against diffusers on a folder that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_ovis, peer

import qwenimg
from qwenimg.common.families.ovis.texts import LENGTH, TEMPLATE
from qwenimg.common.parts import known_configs
from qwenimg.common.prompts import qwen
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 5  # levels of 255 by which each input must move some pixel: a fault in it would show
LONG = "a blue square with three yellow stars over a small red house, " * 40
CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "width": 80, "height": 48, "steps": 4, "guidance": 5.0},
    {"prompt": 'a sign "Open 24" don\'t', "negative_prompt": "x", "width": 48, "height": 112, "steps": 3,
     "guidance": 7.5},
    {"prompt": "一个“背景”的圆", "negative_prompt": LONG, "width": 64, "height": 80, "steps": 2, "guidance": 1.5},
    {"prompt": LONG, "width": 48, "height": 48, "steps": 2, "guidance": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("asked", CASES, ids=lambda asked: f"{asked['width']}x{asked['height']}-{asked['guidance']}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_ovis: Path, asked: dict[str, Any]) -> None:
    expected = oracle_ovis.generate(tiny_ovis, seed=7, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        ours = qwenimg.load(tiny_ovis, backend=backend, precision="fp32")(**asked, seed=7)
        peer.check_picture(f"{backend} {asked['guidance']}", ours, expected, LATENTS, PIXELS)


@pytest.mark.sample(0)
def test_each_input_moves_the_picture(tiny_ovis: Path) -> None:
    pipe = qwenimg.load(tiny_ovis, backend="cpu", precision="fp32")
    usual: dict[str, Any] = {"prompt": "a ring", "negative_prompt": "x", "width": 80, "height": 48}
    changes: list[dict[str, Any]] = [{"prompt": "two rings"}, {"negative_prompt": "a star"}, {"guidance": 2.0}]
    first, *others = (pipe(**usual | change, steps=2, seed=1).pixels.astype(int) for change in ({}, *changes))
    moved = [np.abs(first - other).max() for other in others]
    print(f"a prompt, a negative prompt, guidance: {moved} of 255")
    assert min(moved) >= MOVES


def test_the_template_is_that_of_diffusers(tiny_ovis: Path) -> None:
    pipe, tokenizer = oracle_ovis.pipeline(tiny_ovis), qwen.load(tiny_ovis / "tokenizer")
    for prompt in ("", "a {} ring", "a\nb ", LONG):
        [message] = pipe._get_messages(prompt)
        expected = pipe.tokenizer(message, add_special_tokens=False).input_ids[: LENGTH + pipe.user_prompt_begin_id]
        assert list(TEMPLATE.fill(tokenizer, prompt).ids) == expected
    assert TEMPLATE.dropped == pipe.user_prompt_begin_id


@pytest.mark.parametrize(("side", "levels"), [
    (1024, (1, 0.904531, 0.759511, 0.512844, 0)), (512, (1, 0.849235, 0.652489, 0.384945, 0)),
])  # fmt: skip
def test_golden_levels(side: int, levels: tuple[float, ...]) -> None:
    sigmas = flow_schedule(known_configs.scheduler("ovis-image"), 4, (side // 16) ** 2)
    assert np.abs(np.subtract(sigmas, levels)).max() <= 1e-6


def test_defaults(tiny_ovis: Path) -> None:
    pipe = qwenimg.load(tiny_ovis, backend="cpu")
    assert (pipe.defaults.steps, pipe.defaults.guidance, pipe.defaults.negative_prompt) == (50, 5.0, "")
    assert pipe.model.texts.lengths(["a", LONG], True) == [LENGTH, LENGTH]


def test_a_cut_prompt_is_told(tiny_ovis: Path) -> None:
    pipe = qwenimg.load(tiny_ovis, backend="cpu")
    [line] = pipe.model.warnings(pipe.check(LONG))
    assert line.startswith("the prompt is cut: the model sees its first 256 tokens")
