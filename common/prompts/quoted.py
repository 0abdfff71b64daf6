"""Prompts whose quoted parts are encoded character by character, for a model that writes them into pictures.

Quotes are ' and ", \u2018 \u2019 and \u201c \u201d, in pairs. An apostrophe between two Latin letters is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from qwenimg.common.prompts.check import check_prompt
from qwenimg.common.prompts.prompt_tokens import PromptTokens
from qwenimg.common.prompts.qwen import QwenTokenizer, Template

_PAIRS = (("'", "'"), ('"', '"'), ("\u2018", "\u2019"), ("\u201c", "\u201d"))
_QUOTED = re.compile("|".join(f"{start}[^{start}{end}]*{end}" for start, end in _PAIRS))
_INSIDE = re.compile("[a-zA-Z]+'[a-zA-Z]+")


def parts(prompt: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of `prompt` in order, each with True if it is quoted: with its quotes."""
    begin = 0
    for match in _QUOTED.finditer(_INSIDE.sub(lambda word: word[0].replace("'", "x"), prompt)):
        start, end = match.span()
        if start > begin:
            yield prompt[begin:start], False
        yield prompt[start:end], True
        begin = end
    if begin < len(prompt):
        yield prompt[begin:], False


def ids(tokenizer: QwenTokenizer, prompt: str) -> list[int]:
    """Return the ids of `prompt`, of each part alone, and of a quoted part character by character. Raises UsageError
    as `check_prompt` does."""
    check_prompt(prompt)
    pieces = (piece for part, is_quoted in parts(prompt) for piece in (part if is_quoted else [part]))
    return [token for piece in pieces for token in tokenizer.ids(piece)]


@dataclass(frozen=True, kw_only=True)
class QuotedTemplate(Template):
    """A text before such prompts: the prompt alone, filled up to `limit` ids with pads, conditions an image."""

    def fill(self, tokenizer: QwenTokenizer, prompt: str) -> PromptTokens:
        found = ids(tokenizer, prompt)
        pads, lost = max(0, self.limit - len(found)), max(0, len(found) - self.limit)
        filled = [*tokenizer.ids(self.text), *found[: self.limit], *[tokenizer.special(self.pad)] * pads]
        return PromptTokens(tuple(filled), lost, pads)

    def start(self, length: int) -> int:
        return length - self.limit

    def used(self, length: int) -> int:
        return self.limit
