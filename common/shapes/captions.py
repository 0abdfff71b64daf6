"""Captions of images in English, from prompts in any language."""

from __future__ import annotations

from qwenimg.common.shapes.words import Parsed, Thing


def english(asked: Parsed) -> str | None:
    """Return a prompt's scene in English: `two yellow stars on a black background`; None if the prompt names no
    shape."""
    if not asked.things:
        return None
    first, *others = (_noun(thing) for thing in asked.things)
    text = " and ".join([first, *others])
    if asked.relation not in (None, "and") and others:
        text = f"{first} {asked.relation} {others[0]}"
    if asked.position:
        where = {"center": "in the center", "top": "at the top", "bottom": "at the bottom"}
        text += " " + where.get(asked.position, f"on the {asked.position}")
    return f"{text} on {_article(asked.background)} background" if asked.background else text


def _noun(thing: Thing) -> str:
    words = " ".join(word for word in (thing.size, thing.color, thing.shape) if word)
    if thing.count == 1:
        return _article(words)
    plural = words + ("es" if words.endswith(("s", "x")) else "s")
    count = {None: "", 2: "two ", 3: "three "}.get(thing.count, f"{thing.count} ")
    return count + plural


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
