"""LongCat-Image and -Edit from a prompt to pixels, on both backends, against diffusers on folders that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import oracle_longcat, peer

import qwenimg
from qwenimg.common.families.longcat import references
from qwenimg.common.numbers import sizes
from qwenimg.common.parts import known_configs
from qwenimg.common.prompts import quoted, qwen
from qwenimg.common.sampling.flow_match import flow_schedule

BACKENDS = ("cpu", "mlx")
LATENTS = 1e-5  # relative L2 of the final latents
PIXELS = 2  # of 255: a value on a rounding edge may go either way
MOVES = 8  # levels of 255 by which each input must move some pixel: a fault in it would show
LONG = "a blue square with three yellow stars over a small red house, " * 40
CASES: list[dict[str, Any]] = [
    {"prompt": "a red circle", "width": 80, "height": 48, "steps": 4, "guidance": 4.0},
    {"prompt": 'a sign "Open 24" don\'t', "negative_prompt": "x", "width": 48, "height": 112, "steps": 3,
     "guidance": 7.5},
    {"prompt": "一个\u201c背景\u201d的圆", "negative_prompt": LONG, "width": 64, "height": 80, "steps": 2,
     "guidance": 1.5},
    {"prompt": LONG, "width": 48, "height": 48, "steps": 2, "guidance": 1.0},
]  # fmt: skip
RNG = np.random.default_rng(11)
WIDE, HIGH = (RNG.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((300, 500), (333, 222)))
EDITS: list[tuple[np.ndarray, dict[str, Any]]] = [
    (WIDE, {"prompt": "make it red", "negative_prompt": "blue circles", "steps": 3, "guidance": 4.5}),
    (HIGH, {"prompt": "write 'a 圆' on it", "steps": 2, "guidance": 2.5}),
    (HIGH, {"prompt": "x" * 512, "steps": 2, "guidance": 1.0}),  # without pads; the class fails on a longer one
]


@pytest.mark.parametrize("asked", CASES, ids=lambda asked: f"{asked['width']}x{asked['height']}-{asked['guidance']}")
@pytest.mark.sample(1)
def test_equals_diffusers(tiny_longcat: dict[str, Path], asked: dict[str, Any]) -> None:
    folder = tiny_longcat["longcat"]
    expected = oracle_longcat.generate(folder, seed=7, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        ours = qwenimg.load(folder, backend=backend, precision="fp32")(**asked, seed=7)
        peer.check_picture(f"{backend} {asked['guidance']}", ours, expected, LATENTS, PIXELS)


@pytest.mark.parametrize("case", EDITS, ids=lambda case: f"{case[0].shape[1]}-{case[1]['guidance']}")
@pytest.mark.sample(1)
def test_editing_equals_diffusers(
    tiny_longcat: dict[str, Path], monkeypatch: pytest.MonkeyPatch, case: tuple[np.ndarray, dict[str, Any]]
) -> None:
    oracle_longcat.make_pictures_small(monkeypatch)
    (picture, asked), folder = case, tiny_longcat["longcat-edit"]
    width, height = references.size(picture)
    expected = oracle_longcat.generate(folder, seed=7, width=width, height=height, picture=picture, **asked)
    assert expected[1].std() > 10, "a constant picture would prove nothing"
    for backend in BACKENDS:
        pipe = qwenimg.load(folder, backend=backend, precision="fp32")
        ours = pipe(**asked, image=picture, seed=7, width=width, height=height)
        peer.check_picture(f"{backend} edit {asked['guidance']}", ours, expected, LATENTS, PIXELS)


@pytest.mark.sample(0)
def test_each_input_moves_the_picture(tiny_longcat: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_longcat.make_pictures_small(monkeypatch)
    pipe = qwenimg.load(tiny_longcat["longcat-edit"], backend="cpu", precision="fp32")
    usual: dict[str, Any] = {"prompt": "a ring", "image": WIDE, "negative_prompt": "x", "width": 80, "height": 48}
    changes: list[dict[str, Any]] = [{"prompt": "'a ring'"}, {"image": HIGH}, {"negative_prompt": "a star"}]
    first, *others = (pipe(**usual | change, steps=2, seed=1).pixels.astype(int) for change in ({}, *changes))
    moved = [np.abs(first - other).max() for other in others]
    print(f"a prompt, a picture, a negative prompt: {moved} of 255")
    assert min(moved) >= MOVES


# Quotes

PROMPTS = (
    "a cat",
    "write 'Hello' on it",
    'a "sign" and \u2018one\u2019 more \u201c招牌\u201d',
    "the dog's bone and 'its' name",
    "'a' \"b' c\" d'",
    "\u201copen",
    "\u2018a\u2018b\u2019",
    "''",
    "rock'n'roll 'live'",
    "",
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_quotes_are_those_of_diffusers(prompt: str) -> None:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

    assert list(quoted.parts(prompt)) == split_quotation(prompt)


def test_words_with_apostrophes_stay_apart() -> None:
    """diffusers takes one of several such words for another."""
    assert list(quoted.parts("don't say 'it' if it's so")) == [
        ("don't say ", False), ("'it'", True), (" if it's so", False),
    ]  # fmt: skip


def test_quoted_text_is_encoded_by_character(tiny_longcat: dict[str, Path]) -> None:
    tokenizer = qwen.load(tiny_longcat["longcat"] / "tokenizer")
    plain, spelled = (quoted.ids(tokenizer, prompt) for prompt in ("a red circle", '"a red circle"'))
    assert len(plain) == 3 and spelled == [token for one in '"a red circle"' for token in tokenizer.ids(one)]


# Numbers


@pytest.mark.parametrize("size", [(1664, 928), (4, 3), (3, 1), (1000, 1001), (17, 2000), (512, 512)])
def test_sizes_are_those_of_diffusers(size: tuple[int, int]) -> None:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions

    assert sizes.over_area(1024**2, *size) == calculate_dimensions(1024**2, size[0] / size[1])


@pytest.mark.parametrize(("side", "levels"), [
    (1024, (1, 0.904531, 0.759511, 0.512844, 0)), (512, (1, 0.849235, 0.652489, 0.384945, 0)),
])  # fmt: skip
def test_golden_levels(side: int, levels: tuple[float, ...]) -> None:
    for name in ("longcat-image", "longcat-image-edit"):
        sigmas = flow_schedule(known_configs.scheduler(name), 4, (side // 16) ** 2)
        assert np.abs(np.subtract(sigmas, levels)).max() <= 1e-6


def test_defaults(tiny_longcat: dict[str, Path]) -> None:
    text, edit = (qwenimg.load(tiny_longcat[name], backend="cpu") for name in ("longcat", "longcat-edit"))
    assert (text.defaults.steps, text.defaults.guidance, text.defaults.negative_prompt) == (50, 4.0, "")
    asked = edit.check("make it red", image=WIDE)
    assert (asked.width, asked.height, asked.strength, asked.guidance) == (1328, 800, 1.0, 4.5)


def test_a_cut_prompt_is_told(tiny_longcat: dict[str, Path]) -> None:
    pipes = {name: qwenimg.load(tiny_longcat[name], backend="cpu") for name in ("longcat", "longcat-edit")}
    requests = {"longcat": {}, "longcat-edit": {"image": WIDE}}
    for name, pipe in pipes.items():
        [line] = pipe.model.warnings(pipe.check(LONG, **requests[name]))
        assert line.startswith("the prompt is cut: the model sees its first 512 tokens")
