"""Prompts of the built-in model: what `describe` writes about a scene, `parse` reads back, in English and Chinese.

- One table of words serves both directions and the tokenizer; a word means the same wherever it stands.
- `parse` keeps no grammar: attributes gather until a noun takes them, and what comes after a noun is given to it.
- What a prompt leaves out is None in `Parsed`, so that a checker does not ask for it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np

from qwenimg.common.shapes.scenes import OPPOSITE, RELATIONS, Object, Scene, backgrounds, pick

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
"""Words that occur in prompts and that `describe` does not write: each is read as the other one, and so is its token,
since its embedding is written as the other's (`same_tokens`). Within a table above it would change the data."""
FILLERS = (
    "a an the of in on at with to is are that there it picture image drawing photo draw paint show me please side",
    "个 颗 只 枚 块 的 在 有 是 位于 上 里 中 画 请 给我 帮我 一张 一幅 图 图片 图画 画面",
)
LANGUAGES: tuple[Language, ...] = ("en", "zh")
SAY_COLOR = 0.9  # how often a prompt names it; often enough left out for a prompt without one to have a meaning
SAY_USUAL = 0.25  # how often a prompt names the usual size or place; any other always, so none named has one meaning
USUAL_SIZE, USUAL_POSITION = "medium", "center"


@dataclass(frozen=True, kw_only=True)
class Thing:
    """What a prompt says about an object, or about `count` that are the same; None where it says nothing."""

    shape: str
    color: str | None = None
    size: str | None = None
    count: int | None = 1


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a prompt asks for. `position` is of the only thing, `relation` of the first of two to the second."""

    things: tuple[Thing, ...] = ()
    background: str | None = None
    position: str | None = None
    relation: str | None = None
    unknown: tuple[str, ...] = ()

    @property
    def has_noun(self) -> bool:
        """Whether it names anything that the model can draw."""
        return bool(self.things)


def requirements(scene: Scene) -> Parsed:
    """All that a prompt could ask for and `scene` has."""
    objects = scene.objects if scene.relation else scene.objects[:1]
    count = 1 if scene.relation else len(scene.objects)
    things = tuple(Thing(shape=o.shape, color=o.color, size=o.size, count=count) for o in objects)
    return Parsed(things=things, background=scene.background, position=scene.position, relation=scene.relation)


# Reading


@cache
def _lexicon() -> dict[str, tuple[str, str]]:
    """Every word and fixed phrase: its kind, and what it means there."""
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
                words |= {_plural(word): ("shapes", value) for word in english}
            if kind == "color":
                words |= {word + "色": (kind, value) for word in chinese}
    return words | {word: words[other] for word, other in SAME_AS.items()}


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x")) else "s")


def vocabulary() -> set[str]:
    """Every word that `describe` may write and `parse` knows; English phrases are split at spaces."""
    return {word for phrase in _lexicon().keys() - SAME_AS.keys() for word in phrase.split()}


@cache
def _pattern() -> re.Pattern[str]:
    """A known word or phrase, the longest that fits; an unknown word; or a mark. Chinese has no spaces."""
    longest = sorted(_lexicon(), key=lambda word: (-len(word), word))
    spaced = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in longest if word.isascii())
    chinese = "|".join(re.escape(word) for word in longest if not word.isascii())
    letter, sign = r"[^\W_\u3400-\u9fff]", r"[\u3400-\u9fff\u2190-\u2bff\U0001f000-\U0001faff]"
    return re.compile(
        rf"(?P<known>(?<!{letter})(?:{spaced})(?!{letter})|{chinese})"
        rf"|(?P<word>{letter}+(?:['’-]{letter}+)*)|(?P<sign>{sign})|(?P<mark>[^\w\s])"
    )


def _words(prompt: str) -> Iterator[tuple[str, str]]:
    """(kind, meaning) of each word; ("unknown", text) of one outside the vocabulary, a run of signs being one."""
    lexicon, end, held = _lexicon(), 0, ""
    plain = re.sub(r"['’]s\b", "", unicodedata.normalize("NFKC", prompt).lower())  # it's, the star's
    for match in _pattern().finditer(plain):
        text, apart, end = match[0], match.start() > end, match.end()
        if held and (apart or match.lastgroup != "sign"):
            yield "unknown", held
            held = ""
        if match.lastgroup == "known":
            yield lexicon[" ".join(text.split())]
        elif match.lastgroup == "sign":
            held += text
        else:
            yield ("unknown", text) if match.lastgroup == "word" else ("break", "")
    if held:
        yield "unknown", held


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
        """Attributes that no noun took belong to the noun before: "a circle in red and"."""
        if self.things:
            last = self.things[-1]
            self.things[-1] = replace(last, color=last.color or self.color, size=last.size or self.size)
            self.color = self.size = None


def parse(prompt: str) -> Parsed:
    """What `prompt` asks of a scene. Never fails: words outside the vocabulary are listed, once each, in order."""
    draft = _Draft()
    for kind, value in _words(prompt):
        draft.read(kind, value)
    draft.give_back()
    parsed = Parsed(things=tuple(draft.things), background=draft.background, unknown=tuple(draft.unknown))
    return _arranged(parsed, draft.places, draft.relations)


def _arranged(parsed: Parsed, places: list[tuple[str, int]], relations: list[str]) -> Parsed:
    """`parsed` with its position or relation, from the words for places and relations in their order."""
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


# Writing


def describe(scene: Scene, rng: np.random.Generator, language: Language) -> str:
    """A prompt for `scene`: some of what is on it, and nothing that is not. The colours are nearly always named,
    sizes and places always unless they are the usual ones, and so is the background."""
    background = scene.background
    usual = backgrounds(*(o.color for o in scene.objects))[0] == background
    named = None if usual and rng.random() < 0.7 else background
    return _english(scene, named, rng) if language == "en" else _chinese(scene, named, rng)


def plain(scene: Scene) -> str:
    """The one prompt that names all of a scene with one object, in English, each thing by its first word."""
    o = scene.objects[0]
    place = f"{_PREPOSITION[scene.position]} the {scene.position}" if scene.position else ""
    return f"{_article(o.size)} {o.color} {o.shape} {place} on {_article(scene.background)} background"


def only_color(scene: Scene, rng: np.random.Generator, language: Language) -> str:
    """The colour of the first object, and nothing else: the usual negative prompt."""
    return _word(rng, COLOR_WORDS[scene.objects[0].color], language) + ("色" if language == "zh" else "")


def _says(value: str, usual: str, rng: np.random.Generator) -> bool:
    """Whether a prompt names `value`: always, unless it is the usual one."""
    return value != usual or rng.random() < SAY_USUAL


def _word(rng: np.random.Generator, words: Synonyms, language: Language) -> str:
    """A synonym; the first is as likely as all others together."""
    choice = words[LANGUAGES.index(language)]
    return choice[0] if rng.random() < 0.5 else pick(rng, choice)


def _english(scene: Scene, background: str | None, rng: np.random.Generator) -> str:
    a, b = scene.objects[0], scene.objects[-1]
    count = len(scene.objects) if scene.relation is None else 1
    text = _noun_phrase(a, count, rng)
    if scene.relation:
        text = _english_pair(text, scene.relation, _noun_phrase(b, 1, rng), rng)
    elif scene.position and _says(scene.position, USUAL_POSITION, rng):
        text += " " + _english_place(scene.position, rng)
    nouns, verbs = ("a picture of ", "an image of ", "a drawing of "), ("draw ", "please draw ", "paint ", "show me ")
    text = pick(rng, ("", "", "", *nouns, *verbs, "there is " if count == 1 else "there are ")) + text
    if background:
        ground = f"{_word(rng, COLOR_WORDS[background], 'en')} {_word(rng, BACKGROUND_WORDS, 'en')}"
        ends = (f"{text} on {_article(ground)}", f"{text} on {_article(ground)}", f"{text}, {ground}")
        text = pick(rng, (*ends, f"{text} with {_article(ground)}", f"on {_article(ground)}, {text}"))
    text = text[0].upper() + text[1:] if rng.random() < 0.15 else text
    return text + "." if rng.random() < 0.15 else text


def _noun_phrase(o: Object, count: int, rng: np.random.Generator) -> str:
    """An object with its article or number: "a small red circle", "a circle that is red", "2 boxes"."""
    noun = _word(rng, SHAPE_WORDS[o.shape], "en")
    size = _word(rng, SIZE_WORDS[o.size], "en") if _says(o.size, USUAL_SIZE, rng) else ""
    color = _word(rng, COLOR_WORDS[o.color], "en") if rng.random() < SAY_COLOR else ""
    after = bool(color) and rng.random() < 0.12
    bare = " ".join(word for word in (size, "" if after else color, noun if count == 1 else _plural(noun)) if word)
    number = f"{_word(rng, COUNT_WORDS[count], 'en')} {bare}"
    phrase = number if count > 1 else pick(rng, (*[_article(bare)] * 4, number, bare))
    verb = "is" if count == 1 else "are"
    return f"{phrase} {pick(rng, ('in', f'that {verb}'))} {color}" if after else phrase


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


_PREPOSITION = {"center": "in", "left": "on", "right": "on", "top": "at", "bottom": "at"}


def _english_place(position: str, rng: np.random.Generator) -> str:
    word = _word(rng, PLACE_WORDS[position], "en")
    of = pick(rng, ("", "", " of the picture", " of the image"))
    side = " side" if position in ("left", "right") and rng.random() < 0.3 else ""
    return f"{_PREPOSITION[position]} the {word}{side}{of}"


def _english_pair(a: str, relation: str, b: str, rng: np.random.Generator) -> str:
    if relation == "and":
        return f"{a} and {b}"
    side = RELATIONS[relation]
    if rng.random() < 0.15:
        here, there = (f"{_PREPOSITION[place]} the {place}" for place in (side, OPPOSITE[side]))
        return f"{a} {here} and {b} {there}"
    if side in ("left", "right"):
        return f"{a} {pick(rng, ('to the ', 'to the ', 'on the ', ''))}{side} of {b}"
    word = _word(rng, RELATION_WORDS[relation], "en")
    return f"{a} {'on top of' if word == 'top of' else word} {b}"


def _chinese(scene: Scene, background: str | None, rng: np.random.Generator) -> str:
    a, b = scene.objects[0], scene.objects[-1]
    count = len(scene.objects) if scene.relation is None else 1
    text, clause = _chinese_thing(a, count, rng), False
    if scene.relation == "and":
        text += pick(rng, ("和", "与")) + _chinese_thing(b, 1, rng)
    elif scene.relation:
        text, clause = _chinese_pair(text, RELATIONS[scene.relation], _chinese_thing(b, 1, rng), rng), True
    elif scene.position and _says(scene.position, USUAL_POSITION, rng):
        place = _word(rng, PLACE_WORDS[scene.position], "zh")
        text = pick(rng, (f"{text}在{place}", f"{text}位于{place}", f"{place}有{text}", f"在{place}的{text}"))
        clause = True
    start = pick(rng, ("", "", "", "画", "请画", "一张图片，", "" if clause else "图中有"))
    if background is None:
        return start + text + pick(rng, ("", "", "", "。"))
    ground = _word(rng, COLOR_WORDS[background], "zh") + pick(rng, ("色", "色", "色的"))
    fronts = (f"{ground}背景上{'，' if clause else '的'}{text}", f"在{ground}背景上，{text}")
    return start + pick(rng, (*fronts, f"{text}，{ground}背景", f"{text}，背景是{ground}"))


def _chinese_thing(o: Object, count: int, rng: np.random.Generator) -> str:
    noun = _word(rng, SHAPE_WORDS[o.shape], "zh")
    ending = pick(rng, ("色的", "色的", "色", ""))
    color = _word(rng, COLOR_WORDS[o.color], "zh") + ending if rng.random() < SAY_COLOR else ""
    size = _word(rng, SIZE_WORDS[o.size], "zh") if _says(o.size, USUAL_SIZE, rng) else ""
    measure = "颗" if o.shape in ("star", "heart") and rng.random() < 0.5 else "个"
    number = _word(rng, COUNT_WORDS[count], "zh") + measure
    return (number if count > 1 or rng.random() < 0.8 else "") + size + color + noun


def _chinese_pair(a: str, side: str, b: str, rng: np.random.Generator) -> str:
    here, there = (_word(rng, PLACE_WORDS[s], "zh") for s in (side, OPPOSITE[side]))
    pairs = (f"{a}在{b}的{here}", f"{a}在{b}{here}", f"{b}的{here}有{a}", f"{b}的{here}是{a}")
    return pick(rng, (*pairs, f"{a}在{here}，{b}在{there}"))
