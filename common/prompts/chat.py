"""The chat templates of language models, as data: a file's own template is a program, and never run.

Special tokens are in the constant parts alone. Each part is encoded by itself, so that no text merges with a part
around it, and a marker that is typed in a text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from qwenimg.common.base.errors import UsageError

LONGEST = 1024  # tokens of what a user asks

# A space in the braces belongs to the text: SentencePiece's models have a piece for a word with the space before it.
_TEXT = re.compile(r"\{(?P<space> ?)(?P<name>system|pictures|user|answer)\}")


class ChatTokenizer(Protocol):
    """The tokenizer of a language model that writes."""

    @property
    def word_ids(self) -> frozenset[int]:
        """The ids of tokens that are text."""
        ...

    def has(self, *tokens: str) -> bool:
        """Return whether all of these special tokens are there."""
        ...

    def special(self, token: str) -> int:
        """Return the id of a special token. Raises ModelError for a vocabulary without it."""
        ...

    def plain(self, text: str) -> list[int]:
        """Return the ids of `text`, none of which is a special token's: text that spells one stays text."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens, and with U+FFFD for bytes that are not UTF-8."""
        ...


@dataclass(frozen=True)
class Turn:
    """An earlier question of a conversation, the number of its pictures, and its answer."""

    question: str
    answer: str
    pictures: int = 0


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A chat template: an instruction and a question, which may be about pictures, and then the answer is written."""

    name: str
    special: tuple[str, ...]  # its special tokens: a vocabulary that has all of them may have this template
    text: str  # with {system}, {user}, and {pictures} if it sees some
    turn: str  # what follows an earlier question: {answer}, and the next question
    picture: tuple[str, str, str] | None = None  # the tokens of a picture: before its slots, of a slot, after them
    stops: tuple[str, ...]  # special tokens that end an answer, if the vocabulary has them

    def ids(
        self,
        tokenizer: ChatTokenizer,
        system: str,
        user: str,
        slots: Sequence[int] = (),
        earlier: Sequence[Turn] = (),
    ) -> tuple[list[int], list[int]]:
        """Return the ids of an instruction and a question, which are not checked, and how many of them stand before the
        slots of each picture. slots: their number, for each picture, those of earlier questions first. Raises
        UsageError for more than LONGEST tokens of all questions and answers."""
        ids, starts, at, count, left = list[int](), list[int](), 0, 0, iter(slots)
        texts = {"user": iter([*(turn.question for turn in earlier), user])}
        texts |= {"answer": iter([turn.answer for turn in earlier]), "system": iter([system])}
        pictures = iter([*(list(islice(left, turn.pictures)) for turn in earlier), list(left)])
        template = self.text.replace("user}", "user}" + len(earlier) * self.turn)
        for match in _TEXT.finditer(template):
            ids += self._constant(tokenizer, template[at : match.start()])
            at = match.end()
            if match["name"] == "pictures":
                starts += self._pictures(tokenizer, next(pictures), ids)
                continue
            asked = tokenizer.plain(match["space"] + next(texts[match["name"]]))
            count += len(asked) if match["name"] != "system" else 0
            ids += asked
        if count > LONGEST:
            what = "conversation" if earlier else "prompt"
            raise UsageError(f"the {what} has {count:,} tokens; a language model is given at most {LONGEST:,}")
        return ids + self._constant(tokenizer, template[at:]), starts

    def opening(self, tokenizer: ChatTokenizer, system: str) -> list[int]:
        """Return the first ids of all conversations with an instruction: those up to the pictures and the question."""
        first = next(match for match in _TEXT.finditer(self.text) if match["name"] != "system")
        return replace(self, text=self.text[: first.start()]).ids(tokenizer, system, "")[0]

    def stop_ids(self, tokenizer: ChatTokenizer) -> frozenset[int]:
        """Return the ids that end an answer."""
        return frozenset(tokenizer.special(token) for token in self.stops if tokenizer.has(token))

    def _pictures(self, tokenizer: ChatTokenizer, slots: Sequence[int], ids: list[int]) -> list[int]:
        """Append the ids of pictures to `ids`, and return how many stand before the slots of each."""
        starts = list[int]()
        for count in slots:
            assert self.picture is not None
            begin, slot, end = map(tokenizer.special, self.picture)
            starts.append(len(ids) + 1)
            ids += [begin, *(count * [slot]), end]
        return starts

    def _constant(self, tokenizer: ChatTokenizer, text: str) -> list[int]:
        found = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        ids = list[int]()
        for i, part in enumerate(found):
            ids += [tokenizer.special(part)] if i % 2 else tokenizer.plain(part)
        return ids


_START, _END = "<|im_start|>", "<|im_end|>"
_SYSTEM = f"{_START}system\n{{system}}{_END}\n"
_ANSWER = f"{_END}\n{_START}assistant\n"
_PICTURE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_STOPS = (_END, "<|endoftext|>")
_NEXT = f"{_ANSWER}{{answer}}{_END}\n{_START}user\n"

CHATML = Chat(
    name="ChatML",
    special=(_START, _END),
    text=f"{_SYSTEM}{_START}user\n{{user}}{_ANSWER}",
    turn=f"{_NEXT}{{user}}",
    stops=_STOPS,
)
QWEN3 = Chat(
    name="ChatML without thinking",
    special=(_START, _END, "<think>", "</think>"),
    text=f"{_SYSTEM}{_START}user\n{{user}}{_ANSWER}<think>\n\n</think>\n\n",
    turn=f"{_NEXT}{{user}}",
    stops=_STOPS,
)
QWEN_VL = Chat(
    name="ChatML with pictures",
    special=(_START, _END, *_PICTURE),
    text=f"{_SYSTEM}{_START}user\n{{pictures}}{{user}}{_ANSWER}",
    turn=f"{_NEXT}{{pictures}}{{user}}",
    picture=_PICTURE,
    stops=_STOPS,
)
