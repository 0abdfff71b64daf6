"""Prompts for scenes, in English and Chinese; `qwenimg.common.shapes.words.parse` reads them back."""

from __future__ import annotations

import hashlib

import numpy as np

from qwenimg.common.shapes.scenes import OPPOSITE, RELATIONS
from qwenimg.common.shapes.words import (
    BACKGROUND_WORDS,
    COLOR_WORDS,
    COUNT_WORDS,
    PLACE_WORDS,
    RELATION_WORDS,
    SHAPE_WORDS,
    SIZE_WORDS,
    Language,
    Synonyms,
    plural,
)
from training.scenes import Object, Scene, backgrounds, pick, random_scene, render

LANGUAGES: tuple[Language, ...] = ("en", "zh")
SAY_COLOR = 0.9  # how often a prompt names it; often enough left out for a prompt without one to have a meaning
SAY_USUAL = 0.25  # how often a prompt names the usual size or place; any other always, so none named has one meaning
USUAL_SIZE, USUAL_POSITION = "medium", "center"


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
    bare = " ".join(word for word in (size, "" if after else color, noun if count == 1 else plural(noun)) if word)
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


def dataset_hash() -> str:
    """SHA-256 of 64 scenes: their pictures in 8 bits and their prompts. It names the data that a model learned from."""
    digest = hashlib.sha256()
    for seed in range(64):
        rng = np.random.default_rng(seed)
        scene = random_scene(rng)
        prompts = "\n".join(describe(scene, rng, language) for language in LANGUAGES)
        picture = np.rint((render(scene, 64 + seed, 64) + 1) * 127.5).astype(np.uint8)
        digest.update(prompts.encode() + picture.tobytes())
    return digest.hexdigest()
