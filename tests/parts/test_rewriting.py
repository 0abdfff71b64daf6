"""Rewriting by a language model that is a stand-in: what is asked of it, second texts, and what a recipe gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.next_token import Decoding
from qwenimg.common.numbers.seeds import MAX_SEED
from qwenimg.common.parts.texts.picture_texts import SeenPicture
from qwenimg.common.parts.texts.rewriting import Draft, Rewritten, rewrite
from qwenimg.common.parts.texts.writing import Conversation, Written
from qwenimg.common.prompts.rewriting import INSTRUCTIONS, OURS

USUAL = OURS.how


class Scripted:
    """Writes the next of its texts for each prompt."""

    resident = "language model"

    def __init__(self, texts: dict[str, list[str]], cut: bool = False):
        self.texts, self.cut, self.calls = texts, cut, list[tuple[list[Conversation], Decoding]]()
        self.dropped = list[str]()
        self.residents = self

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def write(self, asked: Sequence[Conversation], how: Decoding, *more: Any, **named: Any) -> list[Written]:
        self.calls.append((list(asked), how))
        texts = [self.texts[one.user].pop(0) for one in asked]
        return [Written(text=text, whole=text, tokens=len(text), cut=self.cut) for text in texts]


def rewritten(
    writer: Scripted, *prompts: str, how: Decoding = USUAL, keeps: bool = False
) -> tuple[list[Rewritten], list[tuple[str, str]]]:
    told = list[tuple[str, str]]()
    drafts = [Draft(prompt) for prompt in prompts]
    return rewrite(writer, drafts, how, lambda *line: told.append(line), keeps=keeps), told  # type: ignore[arg-type]


def test_each_has_the_instruction_of_its_task_and_language() -> None:
    writer = Scripted({"a cat": ["A cat."], "一只猫": ["猫。"]})
    made, told = rewritten(writer, "a cat", "一只猫")
    assert [one.prompt for one in made] == ["A cat.", "猫。"] and not told
    [(asked, how)] = writer.calls
    assert [one.system for one in asked] == [INSTRUCTIONS["draw", "en"], INSTRUCTIONS["draw", "zh"]] and how == USUAL
    assert writer.dropped == ["language model"]
    picture = SeenPicture("a", np.zeros((8, 8, 3), np.uint8))
    edit = Draft("make it red", (picture,)).conversation
    assert edit.system == INSTRUCTIONS["edit", "en"] and edit.pictures == (picture,)


def test_lost_text_is_written_again_with_another_seed_and_then_given_up() -> None:
    kept, given_up = 'a "B"', 'a "C"'
    writer = Scripted({kept: ["An A.", 'An A with "B".'], given_up: ["An A.", "Still an A."], "d": ["D."]})
    made, told = rewritten(writer, kept, "d", given_up, keeps=True)
    assert [one.prompt for one in made] == ['An A with "B".', "D.", given_up]
    assert [len(asked) for asked, _ in writer.calls] == [3, 2] and not writer.dropped
    assert writer.calls[1][1].seed == USUAL.seed + 1 == made[0].how.seed and made[1].how.seed == USUAL.seed
    assert told == [
        ("stage", 'the model did not keep the quoted text "B": writing once more'),
        ("warning", 'the model did not keep the quoted text "C": the prompt stays as it is'),
    ]


@pytest.mark.parametrize("text", ["", "A cat <lora:cat:1>", "x" * 200_000])
def test_texts_that_are_no_prompt(text: str) -> None:
    made, told = rewritten(Scripted({"a cat": [text, text]}), "a cat")
    assert made[0].prompt == "a cat" and made[0].fault and told[-1][0] == "warning"
    print(told[-1][1])


def test_a_greedy_text_is_drawn_the_second_time_and_seeds_end_at_the_largest() -> None:
    writer = Scripted({'"a"': ["b", '"a" b']})
    made, _ = rewritten(writer, '"a"', how=Decoding(seed=MAX_SEED))
    assert made[0].how.temperature > 0 and made[0].how.seed == 0


def test_a_blank_prompt_is_refused_before_the_model_is_asked() -> None:
    writer = Scripted({})
    with pytest.raises(UsageError, match="the prompt is empty"):
        rewritten(writer, "a cat", " ")
    assert not writer.calls


def test_the_record_of_a_recipe() -> None:
    made, told = rewritten(Scripted({"a cat": ["A cat."]}, cut=True), "a cat")
    assert made[0].record() == {
        "instruction": "1", "task": "draw", "language": "en", "temperature": "0.7", "top_k": "20", "top_p": "0.8",
        "penalty": "1.05", "limit": "300", "seed": "0", "tokens": "6", "cut": "yes",
    }  # fmt: skip
    assert told == [("warning", "the text is cut after 6 tokens, to whole sentences if it has some")]
