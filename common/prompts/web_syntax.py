"""The prompt syntax of the AUTOMATIC1111 web UI in prompts for models that read it as words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.prompts import scheduled

_WEIGHT = re.compile(r"\([^()\[\]:]{1,200}:\s?[+-]?(?:\d{1,3}(?:\.\d{0,6})?|\.\d{1,6})\s?\)")
_WORDS = re.compile(r"(?:(?<=[\s,.])|^)(?:AND|BREAK)(?=[\s,.:]|$)")
_SPLITS = re.compile(r"\b(?:AND|BREAK)\b")
_SIGNS = re.compile(r"[\\()\[\]]")
_NEAR = 40  # characters in which a word's neighbour is sought
_CAPITALS = re.compile(r"[A-Z][A-Z'-]*")  # LOVE AND PEACE is a text to draw


def as_text(prompt: str) -> str:
    """Return the prompt that Stable Diffusion reads as the words of `prompt` alone, without weights, schedules and
    parts."""
    return _SIGNS.sub(r"\\\g<0>", _SPLITS.sub(lambda word: word[0].lower(), prompt))


def warning(prompt: str, weighs: bool = False) -> str | None:
    """Return a warning about the first such thing in `prompt` for a model that reads it as words, or None. weighs: of a
    model that takes weights and BREAK."""
    syntax = _first(prompt, weighs)
    if syntax is None:
        return None
    others = "schedules, alternations and AND" if weighs else "weights, schedules, alternations, AND and BREAK"
    return (
        f"this model reads {clean(syntax, 40)} as words: {others} are for Stable Diffusion; "
        "write what the picture shows in a sentence, without brackets and numbers"
    )


def warnings(prompts: Iterable[str], weighs: bool = False) -> list[str]:
    """Return the first warning about `prompts`, if there is one."""
    return [line for line in (warning(prompt, weighs) for prompt in prompts) if line][:1]


def _first(prompt: str, weighs: bool) -> str | None:
    try:
        change = scheduled.first_change(prompt)
    except UsageError:  # more than would be read
        return "[...|...]"
    if weighs:
        return change or _word(prompt, ("AND",))
    weight = _WEIGHT.search(prompt)
    return change or (weight[0] if weight else None) or _word(prompt, ("AND", "BREAK"))


def _word(prompt: str, words: tuple[str, ...]) -> str | None:
    """Return the first of `words` that stands alone, in no text of capitals."""
    for word in (found for found in _WORDS.finditer(prompt) if found[0] in words):
        start, end = word.span()
        before, after = prompt[max(0, start - _NEAR) : start].split()[-1:], prompt[end : end + _NEAR].split()[:1]
        near = [text.strip("\"'.,:;!?") for text in (*before, *after)]
        if not any(_CAPITALS.fullmatch(text) and len(text) > 1 for text in near):
            return word[0]
    return None
