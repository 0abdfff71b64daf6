"""Captions by Qwen-Image-Layered's text encoder against transformers' `generate` and diffusers' captioner, in float32,
and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
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
from qwenimg.backends.torch.networks.encoders import decoder as on_torch
from qwenimg.backends.torch.ops.kept import KeyValues
from qwenimg.common.families.qwen_image import captions
from qwenimg.common.families.qwen_image.layered import described
from qwenimg.common.numbers.next_token import Decoding, next_token
from qwenimg.common.parts.texts import writing as texts

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
    engine, ours = seen_pictures.opened(folder, backend, captions.NETWORK)
    ids, places, pictures = prompt(PROMPTS[which])
    slots = [ours.slots(*one) for one in pictures]
    opening = ours.opening(ids[: places[0].start if places else 3]) if penalty == 1 else ()
    scores, tokens = engine.numpy(ours.begin(ids, places, slots, opening)), list[int]()
    while len(tokens) < TOKENS:
        tokens.append(next_token(scores, None, {*ids, *tokens}, Decoding(penalty=penalty), 0))
        [scores] = engine.numpy(ours.follow(tokens[-1:]))
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sample(1)
def test_rows_of_unequal_prompts(model: Any, folder: Path, backend: str) -> None:
    """Texts side by side, of which one begins later and one leaves early, are those that each would be alone."""
    engine, ours = seen_pictures.opened(folder, backend, captions.NETWORK)
    expected, rows, texts = {which: reference(model, which, 1.0) for which in PROMPTS}, list[str](), dict[str, Any]()

    def begin(which: str) -> None:
        ids, places, pictures = prompt(PROMPTS[which])
        scores = ours.begin(ids, places, [ours.slots(*one) for one in pictures])
        texts[which] = [int(engine.numpy(scores).argmax())]
        rows.append(which)

    def follow(count: int) -> None:
        for _ in range(count):
            scores = engine.numpy(ours.follow([texts[which][-1] for which in rows]))
            for which, row in zip(rows, scores, strict=True):
                texts[which].append(int(row.argmax()))

    first, second, third = PROMPTS
    begin(first)
    begin(second)
    follow(5)
    begin(third)
    follow(10)
    ours.end(rows.index(second))
    rows.remove(second)
    follow(20)
    for which, text in texts.items():
        print(f"{backend} {which}: {len(text)} tokens")
        assert text == expected[which][: len(text)]
    assert [len(texts[which]) for which in PROMPTS] == [36, 16, 31]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [7, 1])
@pytest.mark.sample(1)
def test_a_prompt_in_chunks(
    model: Any, folder: Path, backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Borders of chunks lie within pictures too."""
    for package in ("torch", "mlx"):
        monkeypatch.setattr(import_module(f"qwenimg.backends.{package}.networks.encoders.decoder"), "PREFILL", tokens)
    assert written(folder, backend, "two pictures", 1.0) == reference(model, "two pictures", 1.0)


# Planted faults of the positions and of the kept keys and values


def _numbered(patch: pytest.MonkeyPatch) -> None:
    """A written token has its number as its position, not the one behind the picture's longest side."""
    begin = on_torch.Writer.begin

    def by_number(self: Any, ids: Any, *seen: Any) -> Any:
        scores = begin(self, ids, *seen)
        self.rows[-1].position = len(ids)
        return scores

    patch.setattr(on_torch.Writer, "begin", by_number)


def _moved(patch: pytest.MonkeyPatch) -> None:
    """The picture's tokens are one further behind."""
    begin = on_torch.Writer.begin

    def late(self: Any, ids: Any, places: Any, *seen: Any) -> Any:
        return begin(self, ids, [place._replace(start=place.start + 1) for place in places], *seen)

    patch.setattr(on_torch.Writer, "begin", late)


def _forgotten(patch: pytest.MonkeyPatch) -> None:
    """Only the last token's keys are seen."""
    extend = KeyValues.extend

    def alone(self: Any, k: Any, v: Any) -> None:
        self.length = 0
        extend(self, k, v)

    patch.setattr(KeyValues, "extend", alone)


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
    how = captions.describing()
    chat = how.chat
    assert chat.picture is not None
    for language, text in how.texts.items():
        assert chat.text.format(system=text, pictures="".join(chat.picture), user="") == published.pop(language)
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
    monkeypatch.setattr(texts.Writer, "stops", frozenset())  # planted: it is ignored
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
