"""Weights in brackets and long prompts, against known examples and the reference's own ids."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_clip import write_tiny_clip_tokenizer

from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts import clip as clip_tokenizer
from qwenimg.common.prompts import weighted
from qwenimg.common.prompts.clip import CLIPTokenizer
from qwenimg.common.prompts.weighted import LENGTH, Chunk, apply_weights, chunks, parse, prompt_chunks

# What users of the web UI are told these mean.
EXAMPLES: dict[str, list[tuple[str, float]]] = {
    "": [],
    "normal text": [("normal text", 1.0)],
    "an (important) word": [("an ", 1.0), ("important", 1.1), (" word", 1.0)],
    "an [unimportant] word": [("an ", 1.0), ("unimportant", 1 / 1.1), (" word", 1.0)],
    "(unbalanced": [("unbalanced", 1.1)],
    "[unbalanced": [("unbalanced", 1 / 1.1)],
    "unbalanced)": [("unbalanced)", 1.0)],
    r"\(literal\]": [("(literal]", 1.0)],
    r"(a \(b\):1.5)": [("a (b)", 1.5)],
    r"one \\ backslash": [("one \\ backslash", 1.0)],
    "a \\ alone": [("a  alone", 1.0)],
    "(unnecessary)(parens)": [("unnecessaryparens", 1.1)],
    "(word:1.2)": [("word", 1.2)],
    "(word: 1.2 )": [("word", 1.2)],
    "(word:.5)": [("word", 0.5)],
    "(word:-1)": [("word", -1.0)],
    "(word:0)": [("word", 0.0)],
    "((word):1.5)": [("word", 1.65)],
    "(a (b:2) c:3)": [("a ", 3.0), ("b", 6.0), (" c", 3.0)],
    "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).": [
        ("a ", 1.0),
        ("house", 1.573),
        (" ", 1.1),
        ("on", 1.0),
        (" a ", 1.1),
        ("hill", 0.55),
        (", sun, ", 1.1),
        ("sky", 1.4641),
        (".", 1.1),
    ],
    # not weights
    "ratio 3:4": [("ratio 3:4", 1.0)],
    "a:1.2)": [("a:1.2)", 1.0)],
    "(a:b)": [("a:b", 1.1)],
    "(a:1.2.3)": [("a:1.2.3", 1.1)],
    "(a:inf)": [("a:inf", 1.1)],
    "(a:1e9)": [("a:1e9", 1.1)],
    "[a:1.2]": [("a:1.2", 1 / 1.1)],
    "()": [],
    # crossed
    "([a)] b": [("a b", 1.0)],
    "(a [b) c]": [("a ", 1.1), ("b", 1.0), (" c", 1 / 1.1)],
    "(a:99999)": [("a", 100.0)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip-tokenizer")
    write_tiny_clip_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> CLIPTokenizer:
    return clip_tokenizer.load(folder)


@pytest.mark.parametrize("prompt", EXAMPLES)
def test_brackets(prompt: str) -> None:
    merged: list[tuple[str, float]] = []
    for text, weight in EXAMPLES[prompt]:
        if merged and merged[-1][1] == weight:
            text = merged.pop()[0] + text
        merged.append((text, weight))
    [found] = parse(prompt)
    print(found)
    assert [text for text, _ in found] == [text for text, _ in merged]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in merged], rel=1e-12)


@settings(max_examples=400)
@given(st.text(alphabet="ab ()[]\\:1.-", max_size=40))
def test_no_text_fails(prompt: str) -> None:
    [parts] = parse(prompt)
    assert all(text and abs(weight) <= weighted.MAX_WEIGHT for text, weight in parts)
    if not set(prompt) & set("()[]\\"):
        assert parts == ([(prompt, 1.0)] if prompt else [])


@pytest.mark.parametrize(
    "pattern", ["(", "[", ")", "([", "(]", "()", "(a:1.2)", ":", ":1", "\\", "(a:" + "1" * 50, None]
)
def test_long_prompts_take_no_time(pattern: str | None) -> None:
    prompt = (pattern * 30_000)[:30_000] + "]" * 10 if pattern else "(" * 15_000 + "]" * 15_000
    start = time.process_time()
    parse(prompt)
    seconds = time.process_time() - start
    print(f"{pattern!r}: {seconds:.2f} s")
    assert seconds < 1  # measured 0.1


def test_without_weights_it_is_the_reference(folder: Path, tokenizer: CLIPTokenizer) -> None:
    from transformers import CLIPTokenizer as Theirs

    theirs = Theirs.from_pretrained(folder)
    for prompt in ("", "a photo of a red circle, ratio 3:4!", "red " * 75, "👍 红色 don't"):
        expected = theirs(prompt, padding="max_length", max_length=LENGTH, truncation=True).input_ids
        assert chunks(tokenizer, prompt) == [Chunk(tuple(expected), (1.0,) * LENGTH)]


def test_chunks_of_75(tokenizer: CLIPTokenizer) -> None:
    words = ["red", "green", "blue", "circle", "square", "cat", "dog", "on", "in", "with"]
    prompt = " ".join(words[i % 10] for i in range(160))
    tokens = tokenizer.words(prompt)
    assert len(tokens) == 160
    found = chunks(tokenizer, f"(red:2) {prompt}")
    assert [len(chunk.ids) for chunk in found] == [LENGTH] * 3
    inner = [token for chunk in found for token in chunk.ids[1:76]]
    assert inner == [*tokenizer.words("red"), *tokens, tokenizer.eos, *[tokenizer.pad] * 63]
    assert all(chunk.ids[0] == tokenizer.bos for chunk in found)
    assert [chunk.ids[76] for chunk in found] == [tokenizer.eos, tokenizer.eos, tokenizer.pad]
    assert [weight for chunk in found for weight in chunk.weights] == [1.0, 2.0, *[1.0] * 229]
    assert len(chunks(tokenizer, "red " * 75)) == 1 and len(chunks(tokenizer, "red " * 76)) == 2


def test_break_fills_the_chunk(tokenizer: CLIPTokenizer) -> None:
    """Each BREAK ends a chunk, an empty one too; one at the end begins none."""
    red, blue = chunks(tokenizer, "red"), chunks(tokenizer, "blue")
    empty = chunks(tokenizer, "")
    assert chunks(tokenizer, "red BREAK blue") == red + blue == chunks(tokenizer, "red\nBREAK\n\nblue BREAK")
    assert chunks(tokenizer, "BREAK red BREAK BREAK blue") == empty + red + empty + blue
    assert chunks(tokenizer, "BREAK") == empty and len(chunks(tokenizer, "red " * 75 + "BREAK blue")) == 2
    assert chunks(tokenizer, "(red:1.5) BREAK blue")[1:] == blue
    assert len(chunks(tokenizer, "red " * 76 + "BREAK " + "blue " * 76)) == 4
    assert chunks(tokenizer, "aBREAK break BREAKS") == chunks(tokenizer, "abreak break breaks")


def test_as_many_chunks_for_every_tokenizer(tmp_path: Path, tokenizer: CLIPTokenizer) -> None:
    """An OpenCLIP tokenizer makes one token of each "!"."""
    write_tiny_clip_tokenizer(tmp_path, pad="!")
    other = clip_tokenizer.load(tmp_path)
    prompt = "!! " * 60
    assert [len(chunks(one, prompt)) for one in (tokenizer, other)] == [1, 2]
    made = prompt_chunks([tokenizer, other], prompt)
    assert made == [chunks(tokenizer, prompt) + chunks(tokenizer, ""), chunks(other, prompt)]
    assert made[0][1].ids == (tokenizer.bos, tokenizer.eos, *[tokenizer.pad] * 75)
    swapped = prompt_chunks([other, tokenizer], prompt)
    assert swapped == made[::-1]
    assert prompt_chunks([tokenizer, other], "") == [chunks(tokenizer, ""), chunks(other, "")]


def test_too_long(tokenizer: CLIPTokenizer) -> None:
    with pytest.raises(UsageError, match="3001 tokens, the limit is 3000"):
        chunks(tokenizer, "red " * 3001)
    assert len(chunks(tokenizer, "red " * 3000)) == weighted.MAX_CHUNKS


# Weights on states


def states(count: int) -> np.ndarray:
    return (0.3 + np.random.default_rng(0).standard_normal((count, LENGTH, 12))).astype(np.float32)


def test_weights_multiply_and_the_mean_is_kept(tokenizer: CLIPTokenizer) -> None:
    prompt = chunks(tokenizer, "a (red:1.5) circle, " + "[cat] " * 80)
    before = states(len(prompt))
    after = apply_weights(before, prompt)
    assert after.shape == (1, len(prompt) * LENGTH, 12) and after.dtype == np.float32
    for index, chunk in enumerate(prompt):
        made = after[0, index * LENGTH : (index + 1) * LENGTH].astype(np.float64)
        exact = before[index].astype(np.float64) * np.array(chunk.weights)[:, None]
        exact *= before[index].astype(np.float64).mean() / exact.mean()
        assert np.abs(made - exact).max() < 1e-6
        assert made.mean() == pytest.approx(before[index].mean(dtype=np.float64), rel=1e-6)
        assert set(chunk.weights) != {1.0}


def test_a_chunk_without_weights_is_not_touched(tokenizer: CLIPTokenizer) -> None:
    prompt = [*chunks(tokenizer, "a red circle"), *chunks(tokenizer, "a (red:0.7) circle")]
    before = states(2)
    after = apply_weights(before, prompt)
    assert np.array_equal(after[0, :LENGTH], before[0])
    assert not np.array_equal(after[0, LENGTH:], before[1])


@pytest.mark.parametrize("weight", ["0", "-3", "100"])
def test_extreme_weights_stay_finite(tokenizer: CLIPTokenizer, weight: str) -> None:
    prompt = chunks(tokenizer, f"({'red ' * 75}:{weight})")
    before = states(1)
    before[0, 0] = before[0, -1] = 0  # nothing is left with weight 0, and the mean turns with -3
    after = apply_weights(before, prompt)
    assert np.isfinite(after).all()
    if weight == "-3":
        assert np.allclose(after[0], -3 * before[0])


def test_the_end_token_is_where_the_pooled_state_is(tokenizer: CLIPTokenizer) -> None:
    from qwenimg.common.networks.encoders import clip

    [chunk] = chunks(tokenizer, "a red circle")
    config = clip.CLIPConfig(eos_token_id=tokenizer.eos)
    assert chunk.ids[clip.eos_position(config, chunk.ids)] == tokenizer.eos
    assert clip.eos_position(config, chunk.ids) == clip.eos_position(clip.VIT_L, chunk.ids) == 4
