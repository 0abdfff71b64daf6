"""Captions by Qwen-Image-Layered's text encoder against transformers' `generate` and diffusers' captioner, in float32,
and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_layered, seen_pictures
from support.seen_pictures import prompt, reference_inputs, seen, theirs
from support.tiny_edit import louder
from support.tiny_layered import with_generation

import qwenimg
from qwenimg import Pipeline
from qwenimg.backends.torch.networks.encoders import qwen_vl_caption as on_torch
from qwenimg.backends.torch.networks.encoders.language_model import KeyValues
from qwenimg.common.families.qwen_image import captions
from qwenimg.common.families.qwen_image.layered import described
from qwenimg.common.networks.encoders.qwen_vl_caption import NETWORK
from qwenimg.common.parts.texts import captions as texts
from qwenimg.common.parts.texts.captions import best

BACKENDS = ("cpu", "mlx")
TOKENS = 40
DISTINCT = 20  # tokens of such a text: of one that repeats itself, equality proves little


@pytest.fixture(scope="module")
def model() -> Any:
    return louder(theirs())


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_encoder")
    model.save_pretrained(folder)
    return folder


PROMPTS = {
    "two pictures": [7, seen(10, 16, seed=1), 5, seen(26, 10, seed=2), 9],
    "a picture at the end": [5, seen(16, 16, seed=3), 1],
    "no picture": [12],
}


def reference(model: Any, which: str, penalty: float) -> list[int]:
    """transformers' tokens behind a prompt, none of which ends it."""
    ids, _, pictures = prompt(PROMPTS[which])
    asked = {"do_sample": False, "max_new_tokens": TOKENS, "repetition_penalty": penalty, "eos_token_id": None}
    with torch.inference_mode():
        made = model.generate(**reference_inputs(ids, pictures), **asked)
    tokens: list[int] = made[0, len(ids) :].tolist()
    return tokens


def written(folder: Path, backend: str, which: str, penalty: float) -> list[int]:
    engine, ours = seen_pictures.opened(folder, backend, NETWORK)
    ids, places, pictures = prompt(PROMPTS[which])
    scores, tokens = ours.begin(ids, places, [ours.slots(*one) for one in pictures]), list[int]()
    while len(tokens) < TOKENS:
        tokens.append(best(engine.numpy(scores), {*ids, *tokens}, penalty))
        scores = ours.follow(tokens[-1])
    return tokens


@pytest.mark.parametrize("which", PROMPTS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.sample(1)
def test_tokens_are_those_of_transformers(model: Any, folder: Path, which: str, penalty: float) -> None:
    expected = reference(model, which, penalty)
    for backend in BACKENDS:
        tokens = written(folder, backend, which, penalty)
        same = sum(ours == theirs for ours, theirs in zip(tokens, expected, strict=True))
        print(f"{backend} {which}, penalty {penalty}: {same} of {TOKENS}, {len(set(expected))} distinct")
        assert tokens == expected and len(set(expected)) >= DISTINCT


# Planted faults of the positions and of the kept keys and values


def _numbered(patch: pytest.MonkeyPatch) -> None:
    """A written token has its number as its position, not the one behind the picture's longest side."""
    follow = on_torch.Runner.follow

    def by_number(self: Any, token: int) -> Any:
        self.places = []
        return follow(self, token)

    patch.setattr(on_torch.Runner, "follow", by_number)


def _moved(patch: pytest.MonkeyPatch) -> None:
    """The picture's tokens are one further behind."""
    begin = on_torch.Runner.begin

    def late(self: Any, ids: Any, places: Any, slots: Any) -> Any:
        return begin(self, ids, [place._replace(start=place.start + 1) for place in places], slots)

    patch.setattr(on_torch.Runner, "begin", late)


def _forgotten(patch: pytest.MonkeyPatch) -> None:
    """Only the last token's keys are seen."""

    def alone(self: Any, k: Any, v: Any) -> Any:
        return k, v

    patch.setattr(KeyValues, "extended", alone)


@pytest.mark.parametrize("fault", [_numbered, _moved, _forgotten])
@pytest.mark.sample(1)
def test_planted_faults_are_caught(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = reference(model, "two pictures", 1.0)
    fault(monkeypatch)
    tokens = written(folder, "cpu", "two pictures", 1.0)
    first = next(i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)) if ours != theirs)
    print(f"{fault.__name__}: token {first} is the first that differs")
    assert first < TOKENS // 2


# The captioner of diffusers

LIMIT = 24
PICTURE = np.random.default_rng(3).integers(0, 256, (70, 96, 4), np.uint8)
ASKED: dict[str, Any] = {"image": PICTURE, "width": 96, "height": 64, "layers": 1, "steps": 1, "seed": 3}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "LIMIT", LIMIT)


def opened(folder: Path, backend: str) -> Pipeline:
    return qwenimg.load(folder, backend=backend, precision="fp32")


def caption(pipe: Pipeline, language: str = "en") -> str:
    request = pipe.check("", caption=language, **ASKED)
    return pipe.model.inputs.described(request).prompt


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.sample(0)
def test_captions_are_those_of_diffusers(tiny_layered: Path, language: str) -> None:
    """With the published settings, a draw of the one best token."""
    expected, tokens = oracle_layered.caption(tiny_layered, described(PICTURE, 96, 64), language, LIMIT)
    assert len(set(tokens)) >= DISTINCT
    for backend in BACKENDS:
        with opened(tiny_layered, backend) as pipe:
            text = caption(pipe, language)
        print(f"{backend} {language}: {len(tokens)} tokens, {len(set(tokens))} distinct, {text[:40]!r}")
        assert text == expected


def test_instructions_are_those_of_diffusers(tiny_layered: Path) -> None:
    pipe = oracle_layered.pipeline(tiny_layered)
    published = {"en": pipe.image_caption_prompt_en, "zh": pipe.image_caption_prompt_cn}
    for language, around in captions.describing().texts.items():
        assert around.template.text.replace("{}", around.before(1)) == published.pop(language)
    assert not published


def stopping(tiny_layered: Path, tmp_path: Path) -> tuple[Path, str, int]:
    """A folder in which the tenth token of the caption or a later one ends it, diffusers' caption up to that, and the
    token."""
    seen = described(PICTURE, 96, 64)
    _, tokens = oracle_layered.caption(tiny_layered, seen, "en", LIMIT)
    stop = next(token for i, token in enumerate(tokens) if i >= 9 and token not in tokens[:i])
    folder = with_generation(tiny_layered, tmp_path / "stopping", eos_token_id=stop)
    _, cut = oracle_layered.caption(tiny_layered, seen, "en", LIMIT, eos_token_id=[stop])
    assert 9 < len(cut) < LIMIT and cut[-1] == stop
    [text] = oracle_layered.pipeline(tiny_layered).vl_processor.batch_decode([cut[:-1]])  # it is a word elsewhere
    return folder, text.strip(), stop


@pytest.mark.sample(0)
def test_a_stop_token_ends_the_caption(tiny_layered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected, stop = stopping(tiny_layered, tmp_path)
    for backend in BACKENDS:
        with opened(folder, backend) as pipe:
            assert caption(pipe) == expected, backend
    monkeypatch.setattr(texts.CaptionTexts, "_stops", lambda self: frozenset())  # planted: it is ignored
    with opened(folder, "cpu") as pipe:
        longer = caption(pipe)
    print(f"{len(expected)} characters up to the token {stop}, {len(longer)} without")
    assert longer.startswith(expected) and longer != expected


def test_the_penalty_is_that_of_the_folder(tiny_layered: Path, tmp_path: Path) -> None:
    seen, captions_of = described(PICTURE, 96, 64), {}
    for penalty in (1.05, 1.5):
        folder = with_generation(tiny_layered, tmp_path / str(penalty), repetition_penalty=penalty)
        captions_of[penalty], _ = oracle_layered.caption(tiny_layered, seen, "en", LIMIT, repetition_penalty=penalty)
        with opened(folder, "cpu") as pipe:
            assert caption(pipe) == captions_of[penalty]
    (folder / "text_encoder" / "generation_config.json").unlink()  # then as published
    with opened(folder, "cpu") as pipe:
        assert caption(pipe) == captions_of[1.05] != captions_of[1.5]
