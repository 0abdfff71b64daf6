"""The prompts that judge the built-in model, each with its seed and the expected scene.

All of it is fixed, the same prompts in the same order everywhere, so that the numbers of two models are comparable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from qwenimg.common.shapes.scenes import (
    BACKGROUNDS,
    HELD_OUT_PAIRS,
    HELD_OUT_RELATIONS,
    PALETTE,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    contrasts,
    trained_pairs,
)
from qwenimg.common.shapes.words import COLOR_WORDS, SHAPE_WORDS, Parsed, Thing

Pair = tuple[str, str]
"""(color, shape)"""


@dataclass(frozen=True, kw_only=True)
class GatePrompt:
    """A prompt, its seed, and the expected scene. `group` names the threshold."""

    group: str
    prompt: str
    seed: int
    wanted: Parsed


def gate_prompts() -> list[GatePrompt]:
    """Return the quality gate: 352 prompts of 88 pairs in 4 seeds ("trained", "held-out"), 176 of the same in Chinese
    with the first 2 of those seeds, and 288 in the groups position, size, background, count, relation and
    held-out-relation. Always the same."""
    pairs = [(color, shape) for color in PALETTE for shape in SHAPES]
    prompts = []
    for index, pair in enumerate(pairs):
        group = "held-out" if pair in HELD_OUT_PAIRS else "trained"
        seeds = range(4 * index, 4 * index + 4)
        prompts += [_gate(group, _english(pair), seed, _thing(pair)) for seed in seeds]
        prompts += [_gate("chinese", _chinese(pair), seed, _thing(pair)) for seed in seeds[:2]]
    return prompts + list(_attribute_prompts()) + list(_relation_prompts())


def selftest_prompts() -> list[GatePrompt]:
    """Return 40 of the gate's prompts, spread evenly over each of its groups: the check of an installed model."""
    shares = {"trained": 7, "held-out": 4, "chinese": 4, "position": 5, "size": 3, "background": 3, "count": 3}
    shares |= {"relation": 10, "held-out-relation": 1}  # each relation twice: most failures are there
    chosen = []
    for group, share in shares.items():
        members = [prompt for prompt in gate_prompts() if prompt.group == group]
        chosen += [members[(2 * i + 1) * len(members) // (2 * share)] for i in range(share)]
    return chosen


def _gate(group: str, prompt: str, seed: int, *things: Thing, **asked: Any) -> GatePrompt:
    return GatePrompt(group=group, prompt=prompt, seed=seed, wanted=replace(Parsed(things=things), **asked))


def _attribute_prompts() -> Iterator[GatePrompt]:
    pairs, seed = _spread(trained_pairs()), 1000
    places = ("in the center", "on the left", "on the right", "at the top", "at the bottom")
    for position, place in list(zip(POSITIONS, places, strict=True)) * 8:
        pair, seed = next(pairs), seed + 1
        yield _gate("position", f"{_english(pair)} {place}", seed, _thing(pair), position=position)
    for size in list(SIZES) * 16:
        pair, seed = next(pairs), seed + 1
        yield _gate("size", _english(pair, size), seed, _thing(pair, size))
    for background in list(BACKGROUNDS) * 8:
        pair, seed = next(p for p in pairs if contrasts(p[0], background)), seed + 1
        prompt = f"{_english(pair)} on a {background} background"
        yield _gate("background", prompt, seed, _thing(pair), background=background)
    for count, number in ((2, "two"), (3, "three")) * 16:
        pair, seed = next(pairs), seed + 1
        plural = "crosses" if pair[1] == "cross" else pair[1] + "s"
        yield _gate("count", f"{number} {pair[0]} {plural}", seed, _thing(pair, count=count))


def _relation_prompts() -> Iterator[GatePrompt]:
    pairs, seed = _spread(trained_pairs()), 2000
    words = {"left of": "to the left of", "right of": "to the right of"}
    held_out = [{color, other} for color, _, other in HELD_OUT_RELATIONS]
    for relation in ("and", *RELATIONS) * 16:
        first, second, seed = next(pairs), next(pairs), seed + 1
        while {first[0], second[0]} in held_out:
            second = next(pairs)
        prompt = f"{_english(first)} {words.get(relation, relation)} {_english(second)}"
        yield _gate("relation", prompt, seed, _thing(first), _thing(second), relation=relation)
    # In the training pictures the first of "A and B" is on the left, so a held-out pair for "left of" is one for "and".
    beside = [(color, "and", other) for color, relation, other in HELD_OUT_RELATIONS if relation == "left of"]
    for color, relation, other in (*HELD_OUT_RELATIONS * 8, *beside * 16):
        first, second = next(p for p in pairs if p[0] == color), next(p for p in pairs if p[0] == other)
        seed += 1
        prompt = f"{_english(first)} {words.get(relation, relation)} {_english(second)}"
        yield _gate("held-out-relation", prompt, seed, _thing(first), _thing(second), relation=relation)


def _spread(pairs: list[Pair]) -> Iterator[Pair]:
    """Yield pairs without end, in steps that change colour and shape; each round begins at another pair."""
    return (pairs[(29 * i + 7 * (i // len(pairs))) % len(pairs)] for i in itertools.count())


def _thing(pair: Pair, size: str | None = None, count: int = 1) -> Thing:
    return Thing(color=pair[0], shape=pair[1], size=size, count=count)


def _english(pair: Pair, size: str = "") -> str:
    words = f"{size} {pair[0]} {pair[1]}".strip()
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _chinese(pair: Pair) -> str:
    return f"一个{COLOR_WORDS[pair[0]][1][0]}色的{SHAPE_WORDS[pair[1]][1][0]}"
