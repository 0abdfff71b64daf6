"""The grammar of prompts with choices, as in sd-dynamic-prompts: `{a|b}`, `{2$$ and $$a|b}`, `{3::a|b}`, `__name__`.

- Braces are a choice if they have a `|` of their own or begin with a number and `$$`. All others are text, and so are
  those that begin with a quoted name and a colon, as in JSON, and brackets with `|` inside, `[a|b]`.
- A backslash before `{`, `}`, `__name__`, or a `|` of a choice makes it text; two before one of these are one.
- Every step takes time in proportion to the text, whatever it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MAX_DEPTH = 50  # choices inside each other
MOST = 9_999  # options that are chosen
MAX_NAME = 200  # characters of the name of a wildcard
# A run of backslashes is read from its start only.
_SIGN = re.compile(
    rf"(?<!\\)(?P<slashes>\\*+)(?:(?P<mark>[{{}}|\[\]])|__(?P<name>[^\W_](?:(?!__)[\w./*-]){{0,{MAX_NAME}}})__)"
)
_JSON = re.compile(r"""\s{0,1000}(?:"[^"]{0,200}"|'[^']{0,200}')\s{0,1000}:""")
_COUNT = re.compile(
    r"\s{0,100}(?P<low>[0-9]{1,4})?(?P<range>-(?P<high>[0-9]{1,4})?)?(?<=[0-9-])\$\$"
    r"(?:(?P<separator>[^${}]{0,200})\$\$)?"
)
_WEIGHT = re.compile(r"\s{0,100}(?P<weight>[0-9]{1,9}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})::")


@dataclass(frozen=True)
class Wildcard:
    """A wildcard: `__name__`."""

    name: str


@dataclass(frozen=True)
class Variants:
    """A choice of `low` to `high` of its options, or of one."""

    options: tuple[Template, ...]
    weights: tuple[float, ...] | None  # None: all alike
    low: int = 1
    high: int = 1
    separator: str = ", "


Template: TypeAlias = "tuple[str | Wildcard | Variants, ...]"
"""A text, choices in it, text, ..."""


def parse(text: str) -> Template | None:
    """Return the parts of `text`, or None if it has no sign of a template and stands for itself. Raises UsageError."""
    signs = _signs(text)
    pairs = _pairs(signs)
    groups = _groups(text, signs, pairs)
    bars = {place for places in groups.values() for place in places}
    ends = {pairs[i] for i in groups}
    levels, place = [_Level()], 0
    for i, sign in enumerate(signs):
        slashes, mark = len(sign["slashes"]), sign["mark"]
        is_text = slashes % 2 == 1
        is_bar = mark == "|" and sign.end() - 1 in bars
        is_ours = sign["name"] is not None or (mark in ("{", "}") if is_text else i in groups or i in ends or is_bar)
        if sign.start() < place or not (is_ours or (is_text and mark == "|" and len(levels) > 1)):
            continue
        levels[-1].parts.append(text[place : sign.start()] + "\\" * (slashes // 2))
        place = sign.end()
        if is_text:
            levels[-1].parts.append(sign[0][slashes:])
        elif sign["name"] is not None:
            levels[-1].parts.append(Wildcard(sign["name"]))
        elif i in ends:
            group = levels.pop().group()
            levels[-1].parts.append(group)
        else:
            if i in groups:
                place = _opened(levels, text, place)
            else:
                levels[-1].end_option()
            place = levels[-1].begin_option(text, place)
    return (*levels[0].parts, text[place:]) if place else None


@dataclass(kw_only=True)
class _Level:
    """A choice that is being read, or the whole text."""

    low: int = 1
    high: int = 1
    separator: str = ", "
    options: list[Template] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    parts: list[str | Wildcard | Variants] = field(default_factory=list)  # of the option that is being read

    def begin_option(self, text: str, place: int) -> int:
        """Read the weight of an option that begins at `place`. Return where its text begins."""
        match = _WEIGHT.match(text, place)
        self.weights.append(1.0 if match is None else float(match["weight"]))
        return place if match is None else match.end()

    def end_option(self) -> None:
        self.options.append(tuple(self.parts))
        self.parts = []

    def group(self) -> Variants:
        self.end_option()
        weights = None if all(self.weights) and len(set(self.weights)) == 1 else tuple(self.weights)
        return Variants(tuple(self.options), weights, self.low, self.high, self.separator)


def _opened(levels: list[_Level], text: str, place: int) -> int:
    """Read the number after an opening brace, begin a choice, and return the position after it."""
    if len(levels) > MAX_DEPTH:
        raise UsageError(f"the prompt has choices in choices, deeper than {MAX_DEPTH}; make it flatter")
    match = _COUNT.match(text, place)
    if match is None:
        levels.append(_Level())
        return place
    low = 1 if match["low"] is None else int(match["low"])
    high = low if match["range"] is None else MOST if match["high"] is None else int(match["high"])
    if low > high:
        raise UsageError(f"the prompt has a choice of {low} to {high}, {clean(match[0], 40)!r}; begin with the smaller")
    separator = ", " if match["separator"] is None else match["separator"]
    levels.append(_Level(low=low, high=high, separator=separator))
    return match.end()


def begins_with_choice(text: str) -> bool:
    """Return whether the first brace of `text`, at its start, is a choice."""
    signs = _signs(text) if text.startswith("{") else []
    return 0 in _groups(text, signs, _pairs(signs))


def escaped(text: str) -> str:
    """Return the template that stands for `text`: itself, unless it has signs of a template. Raises UsageError."""
    if parse(text) is None:
        return text

    def spelled(sign: re.Match[str]) -> str:
        slashes = sign["slashes"]
        odd = len(slashes) % 2 == 1
        if sign["name"] is None and sign["mark"] != "{" and not (sign["mark"] == "}" and odd):
            return sign[0]
        return f"{slashes}{slashes}\\{sign[0][len(slashes) :]}"

    return _SIGN.sub(spelled, text)


def line_weight(line: str) -> tuple[float, str]:
    """Return the weight at the start of an option, 1 without, and the rest."""
    match = _WEIGHT.match(line)
    return (1.0, line) if match is None else (float(match["weight"]), line[match.end() :])


# Which braces are choices


def _signs(text: str) -> list[re.Match[str]]:
    return list(_SIGN.finditer(text)) if "{" in text or "}" in text or "__" in text else []


def _pairs(signs: Sequence[re.Match[str]]) -> dict[int, int]:
    """Return, for each opening brace or bracket that is closed, the index of its closing sign."""
    pairs: dict[int, int] = {}
    waiting: list[int] = []
    braces = 0
    for i, sign in enumerate(signs):
        mark = None if len(sign["slashes"]) % 2 else sign["mark"]
        if mark in ("{", "["):
            waiting.append(i)
            braces += mark == "{"
        elif mark == "]" and waiting and signs[waiting[-1]]["mark"] == "[":
            pairs[waiting.pop()] = i
        elif mark == "}" and braces:
            while signs[waiting[-1]]["mark"] != "{":  # brackets that are never closed
                waiting.pop()
            pairs[waiting.pop()] = i
            braces -= 1
    return pairs


def _groups(text: str, signs: Sequence[re.Match[str]], pairs: dict[int, int]) -> dict[int, list[int]]:
    """Return the places of the bars of each choice, by the number of its opening brace."""
    bars: dict[int, list[int]] = {}
    inside: list[int] = []
    ends = set(pairs.values())
    for i, sign in enumerate(signs):
        if i in pairs:
            inside.append(i)
            bars[i] = []
        elif i in ends:
            inside.pop()
        elif sign["mark"] == "|" and len(sign["slashes"]) % 2 == 0 and inside:
            bars[inside[-1]].append(sign.end() - 1)
    return {
        i: places
        for i, places in bars.items()
        if signs[i]["mark"] == "{"
        and (places or _COUNT.match(text, signs[i].end()))
        and not _JSON.match(text, signs[i].end())
    }
