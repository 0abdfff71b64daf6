"""Texts as they come and whole: characters in parts, thoughts, control characters, and cuts."""

from __future__ import annotations

import random
import unicodedata
from itertools import pairwise

import pytest

from qwenimg.common.prompts.written_text import cut_at_sentence, finished, one_line, steady


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" a cat\n\non a  mat\r\n", "a cat on a  mat"),
        ("a\x1b[31mb\x00c\x07", "a [31mb c"),
        ("a\u202eb\u2066c\u2069 d\u200fe", "a b c d e"),
        ("e\u0301 and \u1112\u1161\u11ab", "é and 한"),
        ("\u2028a\u2029b\ufeff", "a b"),
        ("👩\u200d👩\u200d👧 می\u200cخواهم", "👩\u200d👩\u200d👧 می\u200cخواهم"),
        ("half \ufffd\ufffd", "half"),
        ("\U000e0041\U000e0042hidden", "hidden"),
        ("\n\t\x00 ", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert all(unicodedata.category(c) != "Cc" for c in line)


def test_thoughts_are_dropped() -> None:
    assert finished("<think>\nWell, a cat.\n</think>\n\nA cat sits.") == "A cat sits."
    assert finished("<think>\nWell, a") == "" and finished("a <think> b") == "a <think> b"
    assert finished("so it is</think>A cat.") == "A cat."
    for shown in ("<", "<thi", "<think>", "<think>a\n", "\n<think>a</thin"):
        assert steady(shown) == ""
    assert steady("<think>a</think> A cat") == "A ca"


@pytest.mark.parametrize(
    "whole",
    [
        "  A cat 猫, é e\u0301e\u0323\u0301, 👩\u200d👩\u200d👧\n\n sat.\x07 \u1112\u1161\u11ab The end! ",
        "<think>no\nno</think>\n\nYes. \ufffd\ufffd yes",
    ],
)
def test_what_is_shown_is_always_a_start_of_the_whole(whole: str) -> None:
    """In every division of its bytes, a character that is not whole among them."""
    data, rng = whole.encode(), random.Random(1)
    for end in range(len(data) + 1):
        assert finished(whole).startswith(steady(data[:end].decode(errors="replace"))), end
    for _ in range(50):
        parts = sorted(rng.sample(range(len(data)), 5))
        shown = [steady(data[:end].decode(errors="replace")) for end in parts]
        assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("One. Two. Thr", "One. Two."),
        ("It costs 3.50 and", "It costs 3.50 and"),
        ("He says “Go!” and", "He says “Go!”"),
        ("一只猫。两只", "一只猫。"),
        ("a cat", "a cat"),
        ("a cat.", "a cat."),
        ("Why? (Because.) And", "Why? (Because.)"),
        ("", ""),
    ],
)
def test_a_cut(text: str, cut: str) -> None:
    assert cut_at_sentence(text) == cut
