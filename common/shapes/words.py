"""Prompts of the built-in model in English and Chinese: its vocabulary, and the reading of a prompt.

- One table of words serves both directions and the tokenizer; a word always has the same meaning.
- `parse` has no grammar: attributes are collected until a noun takes them, and attributes after a noun belong to it.
- Parts that a prompt leaves out are None in `Parsed`, so that a checker ignores them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from qwenimg.common.shapes.scenes import OPPOSITE, RELATIONS

Language = Literal["en", "zh"]
Synonyms = tuple[tuple[str, ...], tuple[str, ...]]
"""English words and Chinese words for one thing."""

SHAPE_WORDS = {
    "circle": (("circle", "disc", "disk"), ("圆", "圆形")),
    "square": (("square", "box"), ("正方形", "方形", "方块")),
    "triangle": (("triangle",), ("三角形", "三角")),
    "star": (("star",), ("星星", "五角星", "星形")),
    "diamond": (("diamond", "rhombus"), ("菱形", "钻石")),
    "cross": (("cross", "plus"), ("十字", "十字形", "加号")),
    "ring": (("ring", "hoop"), ("圆环", "环形", "圆圈")),
    "heart": (("heart",), ("心形", "爱心")),
}
COLOR_WORDS = {
    "red": (("red",), ("红",)),
    "green": (("green",), ("绿",)),
    "blue": (("blue",), ("蓝",)),
    "yellow": (("yellow",), ("黄",)),
    "orange": (("orange",), ("橙", "橘")),
    "purple": (("purple", "violet"), ("紫",)),
    "pink": (("pink",), ("粉", "粉红")),
    "brown": (("brown",), ("棕", "褐")),
    "black": (("black",), ("黑",)),
    "white": (("white",), ("白",)),
    "gray": (("gray", "grey"), ("灰",)),
}
SIZE_WORDS = {
    "small": (("small", "little", "tiny"), ("小", "小小的", "小的")),
    "medium": (("medium", "medium-sized"), ("中等", "中等大小的")),
    "large": (("large", "big", "huge"), ("大", "巨大的", "大的")),
}
COUNT_WORDS = {1: (("one", "1"), ("一", "1")), 2: (("two", "2"), ("两", "2")), 3: (("three", "3"), ("三", "3"))}
PLACE_WORDS = {
    "center": (("center", "centre", "middle"), ("中间", "中央", "中心")),
    "left": (("left",), ("左边", "左侧", "左面")),
    "right": (("right",), ("右边", "右侧", "右面")),
    "top": (("top",), ("上方", "上面", "上边", "顶部")),
    "bottom": (("bottom",), ("下方", "下面", "下边", "底部")),
}
RELATION_WORDS = {
    "left of": (("left of",), ()),
    "right of": (("right of",), ()),
    "above": (("above", "over", "top of"), ()),
    "below": (("below", "under", "beneath", "underneath"), ()),
    "and": (("and",), ("和", "与")),
}
BACKGROUND_WORDS = (("background", "backdrop"), ("背景", "背景上面"))
SAME_AS = {"星": "星星"}
"""Words of prompts that the training captions do not have: each is read as the other one, and so is its token, since
its embedding is a copy of the other's (`same_tokens`). Within a table above it would change the data."""
FILLERS = (
    "a an the of in on at with to is are that there it picture image drawing photo draw paint show me please side",
    "个 颗 只 枚 块 的 在 有 是 位于 上 里 中 画 请 给我 帮我 一张 一幅 图 图片 图画 画面",
)


@dataclass(frozen=True, kw_only=True)
class Thing:
    """An object of a prompt, or `count` equal ones; None for an attribute that the prompt leaves open."""

    shape: str
    color: str | None = None
    size: str | None = None
    count: int | None = 1


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """The scene of a prompt. `position`: of the only thing; `relation`: of the first of two things to the second."""

    things: tuple[Thing, ...] = ()
    background: str | None = None
    position: str | None = None
    relation: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def has_noun(self) -> bool:
        """True if it names anything that the model can draw."""
        return bool(self.things)


# Reading


@cache
def _lexicon() -> dict[str, tuple[str, str]]:
    """Return the kind and the meaning of every word and fixed phrase."""
    tables: dict[str, Mapping[str, Synonyms]] = {
        "shape": SHAPE_WORDS,
        "color": COLOR_WORDS,
        "size": SIZE_WORDS,
        "count": {str(count): words for count, words in COUNT_WORDS.items()},
        "place": PLACE_WORDS,
        "relation": RELATION_WORDS,
        "background": {"": BACKGROUND_WORDS},
    }
    words = {word: ("filler", "") for line in FILLERS for word in line.split()}
    for kind, table in tables.items():
        for value, (english, chinese) in table.items():
            words |= dict.fromkeys((*english, *chinese), (kind, value))
            if kind == "shape":
                words |= {plural(word): ("shapes", value) for word in english}
            if kind == "color":
                words |= {word + "色": (kind, value) for word in chinese}
    return words | {word: words[other] for word, other in SAME_AS.items()}


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x")) else "s")


def vocabulary() -> set[str]:
    """Return every word that captions may have and `parse` knows; English phrases are split at spaces."""
    return {word for phrase in _lexicon().keys() - SAME_AS.keys() for word in phrase.split()}


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of the longest known word or phrase, an unknown word, or a mark. Chinese has no spaces."""
    longest = sorted(_lexicon(), key=lambda word: (-len(word), word))
    spaced = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in longest if word.isascii())
    chinese = "|".join(re.escape(word) for word in longest if not word.isascii())
    letter, sign = r"[^\W_\u3400-\u9fff]", r"[\u3400-\u9fff\u2190-\u2bff\U0001f000-\U0001faff]"
    return re.compile(
        rf"(?P<known>(?<!{letter})(?:{spaced})(?!{letter})|{chinese})"
        rf"|(?P<word>{letter}+(?:['’-]{letter}+)*)|(?P<sign>{sign})|(?P<mark>[^\w\s])"
    )


def _words(prompt: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, meaning) of each word; ("unknown", text) of one outside the vocabulary, or of a run of signs."""
    lexicon, end, signs = _lexicon(), 0, ""
    plain = re.sub(r"['’]s\b", "", unicodedata.normalize("NFKC", prompt).lower())  # it's, the star's
    for match in _pattern().finditer(plain):
        text, apart, end = match[0], match.start() > end, match.end()
        if signs and (apart or match.lastgroup != "sign"):
            yield "unknown", signs
            signs = ""
        if match.lastgroup == "known":
            yield lexicon[" ".join(text.split())]
        elif match.lastgroup == "sign":
            signs += text
        else:
            yield ("unknown", text) if match.lastgroup == "word" else ("break", "")
    if signs:
        yield "unknown", signs


@dataclass(kw_only=True)
class _Draft:
    """A prompt that is being read. `color size count` wait for their noun."""

    things: list[Thing] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)  # with the number of things before it
    relations: list[str] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)
    background: str | None = None
    color: str | None = None
    size: str | None = None
    count: int | None = None
    ground: bool = False  # "background" came before its colour

    def read(self, kind: str, value: str) -> None:
        match kind:
            case "color" if self.ground:
                self.background, self.ground = value, False
            case "color":
                if self.color:
                    self.give_back()
                self.color = value
            case "size":
                self.size = value
            case "count":
                self.count = int(value)
            case "shape" | "shapes":
                self.noun(value, 1 if kind == "shape" else None)
            case "background":
                self.ground = self.color is None
                self.background, self.color = self.color or self.background, None
            case "place":
                self.places.append((value, len(self.things)))
            case "relation":
                self.give_back()
                self.relations.append(value)
            case "break":
                self.give_back()
            case "unknown":
                self.unknown[value] = None

    def noun(self, shape: str, count: int | None) -> None:
        self.things.append(Thing(shape=shape, color=self.color, size=self.size, count=self.count or count))
        self.color = self.size = self.count = None
        self.ground = False

    def give_back(self) -> None:
        """Give attributes that no noun took to the noun before: "a circle in red and"."""
        if self.things:
            last = self.things[-1]
            self.things[-1] = replace(last, color=last.color or self.color, size=last.size or self.size)
            self.color = self.size = None


def parse(prompt: str) -> Parsed:
    """Return the scene of `prompt`. Never fails: words outside the vocabulary are listed, once each, in order."""
    draft = _Draft()
    for kind, value in _words(prompt):
        draft.read(kind, value)
    draft.give_back()
    parsed = Parsed(things=tuple(draft.things), background=draft.background, unknown=tuple(draft.unknown))
    return _arranged(parsed, draft.places, draft.relations)


def _arranged(parsed: Parsed, places: list[tuple[str, int]], relations: list[str]) -> Parsed:
    """Return `parsed` with its position or relation, from the words for places and relations in their order."""
    sides = {side: relation for relation, side in RELATIONS.items()}
    known = [relation for relation in relations if relation in RELATIONS]
    if len(parsed.things) == 1:
        named = [place for place, _ in places] + [RELATIONS[relation] for relation in known]
        return replace(parsed, position=named[0] if named else None)
    if len(parsed.things) != 2:
        return parsed
    first, second = parsed.things
    if known:
        return replace(parsed, relation=known[0])
    if len(places) == 2 and OPPOSITE.get(places[0][0]) == places[1][0]:  # A on the left, B on the right
        return replace(parsed, relation=sides[places[0][0]])
    if len(places) == 1 and places[0][0] in sides and not relations:
        relation = sides[places[0][0]]
        if places[0][1] == 1:  # B的左边有A
            return replace(parsed, things=(second, first), relation=relation)
        if places[0][1] == 2:  # A在B的左边
            return replace(parsed, relation=relation)
    return replace(parsed, relation="and")
