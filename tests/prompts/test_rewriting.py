"""The instructions by which prompts are rewritten, and the check of quoted text."""

from __future__ import annotations

import json

import pytest

from qwenimg.common.families.ernie.enhancer import PROTOCOL
from qwenimg.common.prompts.rewriting import INSTRUCTIONS, OURS, language_of, quoted

TOKENS = 400
BYTES_A_TOKEN = 3.5  # at least: 4.2 to 4.4 were counted in all four with Qwen's vocabulary, which is not here


def test_instructions_are_short_and_each_in_its_language() -> None:
    assert sorted(INSTRUCTIONS) == [("draw", "en"), ("draw", "zh"), ("edit", "en"), ("edit", "zh")]
    for (task, language), text in INSTRUCTIONS.items():
        tokens = len(text.encode()) / BYTES_A_TOKEN
        print(f"{task} {language}: {len(text.encode())} bytes, at most about {tokens:.0f} tokens")
        assert tokens <= TOKENS and language_of(text) == language
        assert "<|" not in text and "{" not in text


@pytest.mark.parametrize(
    ("prompt", "language"),
    [("a cat", "en"), ("一只猫", "zh"), ("a sign that says 猫", "zh"), ("猫\u3042", "zh"), ("ねこ", "en"), ("", "en")],
)
def test_languages(prompt: str, language: str) -> None:
    assert language_of(prompt) == language


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ('a sign "OPEN" and "24 h"', ["OPEN", "24 h"]),
        ("“Café”, ‘bar’, «été»", ["Café", "bar", "été"]),
        ("写着「你好」和『世界』", ["你好", "世界"]),
        ('an open " quote', []),
        ('""', []),
        ("the cat's hat, the dogs' hats", []),
        ('"a “b” c"', ["a “b” c"]),
    ],
)
def test_quoted(text: str, inner: list[str]) -> None:
    assert quoted(text) == inner


@pytest.mark.parametrize(
    ("prompt", "written", "missing"),
    [
        ('a sign "OPEN"', 'A wooden sign with "OPEN" in white paint.', []),
        ('a sign "OPEN"', "A wooden sign with “OPEN” in white paint.", []),
        ('a sign "OPEN"', "A wooden sign with OPEN in white paint.", ["OPEN"]),
        ('a sign "OPEN"', 'A wooden sign with "Open".', ["OPEN"]),
        ('"a  b" "c"', 'with "a b" and "c"', ["a  b"]),
        ('"é"', '"e\u0301"', ["é"]),
        ("写着「你好」", "写着“你好”的招牌", []),
        ("写着「你好」", "写着“您好”的招牌", ["你好"]),
        ("a cat", "", []),
    ],
)
def test_lost(prompt: str, written: str, missing: list[str]) -> None:
    assert OURS.lost(prompt, written) == missing


def test_one_trained_for_it_may_choose_its_own_quotation_marks() -> None:
    assert PROTOCOL.lost('a sign "OPEN"', "写着'OPEN'的招牌") == [] and PROTOCOL.lost('a "B"', "a b") == ["B"]
    asked = json.loads(PROTOCOL.user('a "B"\n猫', 640, 480))
    assert asked == {"prompt": 'a "B"\n猫', "width": 640, "height": 480} and "猫" in PROTOCOL.user("猫", 64, 64)
