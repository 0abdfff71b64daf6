"""The instructions for texts about pictures, and tags as they are used."""

from __future__ import annotations

import math
import re

import pytest

from qwenimg.common.prompts import describing
from qwenimg.common.prompts.describing import Asking, tidy_tags

CASES = [(task, language) for task in describing.TASKS for language in describing.LANGUAGES]


def most_tokens(text: str) -> int:
    """More tokens than Qwen's tokenizers need: one for each Chinese character and each mark, one for three letters."""
    words = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", text)
    return sum(math.ceil(len(word) / 3) for word in words) + text.count("\n")


@pytest.mark.parametrize(("task", "language"), CASES)
def test_an_instruction_is_short_text_of_its_language_without_control_tokens(task, language) -> None:
    asking = Asking(task=task, language=language)
    count = most_tokens(asking.system)
    print(f"{task} {language}: at most {count} tokens")
    assert count <= describing.MOST_TOKENS and "<|" not in asking.system + asking.user
    chinese = len(re.findall(r"[\u4e00-\u9fff]", asking.system)) / len(asking.system)
    assert chinese > 0.7 if language == "zh" else asking.system.isascii()


def test_a_question_of_ones_own_takes_the_place_of_the_task() -> None:
    asking = Asking(task="tags", question="how many?")
    assert asking.user == "how many?" and "tag" not in asking.system
    systems = {Asking(task=task, language=language).system for task, language in CASES}  # type: ignore[arg-type]
    assert len(systems) == 4


@pytest.mark.parametrize(
    ("text", "language", "cut", "tidy"),
    [
        ("cat, red hat, Cat, hat.", "en", False, "cat, red hat, hat"),
        ('a sign, "STOP, NOW", night', "en", False, 'a sign, "STOP, NOW", night'),
        ("cat, dog, a bi", "en", True, "cat, dog"),
        ("cat", "en", True, "cat"),
        (" , ,cat,,", "en", False, "cat"),
        ("", "en", False, ""),
        ("猫，红帽子、猫,夜。", "zh", False, "猫，红帽子，夜"),
        ("标牌，“停，走”，夜", "zh", False, "标牌，“停，走”，夜"),
    ],
)
def test_tags_are_each_there_once(text: str, language, cut: bool, tidy: str) -> None:
    assert tidy_tags(text, language, cut=cut) == tidy
