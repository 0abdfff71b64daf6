"""Choices in prompts: the published grammar of sd-dynamic-prompts, what stays text, seeds, and hostile texts."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.choices import SeededChoices
from qwenimg.common.prompts.templates import MAX_DEPTH, begins_with_choice, escaped, parse
from qwenimg.common.prompts.wildcards import MAX_CHOICES, Wildcards

NONE = Wildcards()
FLAVOURS = ("chocolate", "vanilla", "strawberry")


def drawn(prompt: str, seed: int = 1, wildcards: Wildcards = NONE) -> str:
    text = wildcards.chosen({"prompt": prompt}, seed)["prompt"]
    assert isinstance(text, str)
    return text


def several(prompt: str, count: int = 300) -> set[str]:
    return {drawn(prompt, seed) for seed in range(count)}


# What a template may become: the results that docs/SYNTAX.md of sd-dynamic-prompts publishes


def of(separator: str, *counts: int) -> set[str]:
    every = product(FLAVOURS, repeat=2), product(FLAVOURS, repeat=3), ((one,) for one in FLAVOURS)
    rows = [row for rows in every for row in rows if len(set(row)) == len(row) and len(row) in counts]
    return {separator.join(row) for row in rows}


PUBLISHED = {
    "{summer|autumn|winter|spring} is coming": {f"{one} is coming" for one in ("summer", "autumn", "winter", "spring")},
    "{0.5::summer|0.1::autumn|0.3::winter|0.1::spring}": {"summer", "autumn", "winter", "spring"},
    "{2$$chocolate|vanilla|strawberry}": of(", ", 2),
    "{2$$ and $$chocolate|vanilla|strawberry}": of(" and ", 2),
    "{1-2$$ and $$chocolate|vanilla|strawberry}": of(" and ", 1, 2),
    "{-2$$chocolate|vanilla|strawberry}": of(", ", 1, 2),
    "{4$$chocolate|vanilla|strawberry}": of(", ", 3),
    "{a|{b|c}} {d|e}": {f"{one} {two}" for one in "abc" for two in "de"},
    "{a|}{|b}": {"", "a", "b", "ab"},
    "{2$$|$$a|b}": {"a|b", "b|a"},
    "{0-1$$a|b}": {"", "a", "b"},
}


@pytest.mark.parametrize("prompt", PUBLISHED)
def test_a_template_becomes_every_text_that_is_published_and_no_other(prompt: str) -> None:
    assert several(prompt) == PUBLISHED[prompt]


def test_weights_are_shares() -> None:
    found = Counter(drawn("{0.5::a|0.25::b|c|0::d}", seed) for seed in range(7000))
    print({name: count / 7000 for name, count in found.items()}, "of 2/7, 1/7, 4/7")
    assert found.keys() == {"a", "b", "c"}
    for name, share in (("a", 2 / 7), ("b", 1 / 7), ("c", 4 / 7)):
        assert abs(found[name] / 7000 - share) < 0.02  # three standard deviations of a fair draw


# What stays text

PLAIN = [
    "a red circle", "", " ", "a (cat:1.2) [dog] \\(x\\) BREAK [a:b:0.5] [a|b] AND c :2", "{}", "{a}", "a {b} c", "{a",
    "a|b}",
    "}{", "{{a}}", '{"subject": "a cat", "style": {"name": "oil", "sizes": [1, 2]}}', '{"text": "A|B", "n": "$$"}',
    "{'text': 'A|B'}", "[a|b]", "{[a|b]}", "a | b", "5$$", "x$$y", "snake_case__name", "____", "__ a __", "a__",
    "C:\\dir\\x",
    "\\\\{a}", "\\(\\)\\[\\]\\\\", "\\| \\_ \\$", "\u202e{\u0661}", "日本|語", "{" * 3000, "}" * 3000,
    "\\" * 3000, "_" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("prompt", PLAIN)
def test_other_texts_stay_byte_for_byte(prompt: str) -> None:
    assert parse(prompt) is None and escaped(prompt) == prompt
    assert NONE.chosen({"prompt": prompt, "negative_prompt": prompt}, 7) == {
        "prompt": prompt,
        "negative_prompt": prompt,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (r"\{a|b\}", {"{a|b}"}), (r"\{a|b}", {"{a|b}"}), (r"a \{", {"a {"}), (r"\__a__ b", {"__a__ b"}),
        (r"{a\|b|c}", {"a|b", "c"}), (r"{\{|\}}", {"{", "}"}), (r"\\{a|b}", {"\\a", "\\b"}), (r"\\\{a|b}", {r"\{a|b}"}),
        ('{"a": "{x|y}", "b": "1|2"}', {'{"a": "x", "b": "1|2"}', '{"a": "y", "b": "1|2"}'}),
        ("{[a|b]|c}", {"[a|b]", "c"}), ("{(a:1.2)|b}", {"(a:1.2)", "b"}), ("{a [b|c}", {"a [b", "c"}),
        ("{x {y} z|w}", {"x {y} z", "w"}), ("[{a|b}:c:0.5]", {"[a:c:0.5]", "[b:c:0.5]"}), ("{{a|b", {"{{a|b"}),
    ],
)  # fmt: skip
def test_a_backslash_makes_text_and_what_is_text_stays_in_a_choice(prompt: str, texts: set[str]) -> None:
    assert several(prompt, 20) == texts


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["{", "}", "|", "\\", "__", "a", "[", "]", "$$", "2", "1-", "::", '"', ":", " "])))
def test_an_escaped_text_is_drawn_as_it_is(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        template = escaped(text)
    except UsageError as error:
        assert "begin with the smaller" in str(error)
        return
    assert drawn(template, 5) == text


def test_only_a_choice_begins_a_line_that_is_no_json() -> None:
    assert begins_with_choice("{a|b} c") and begins_with_choice("{2$$a|b}") and begins_with_choice("{ {a|b}|c}")
    for line in ('{"prompt": "{a|b}"}', "{prompt: {a|b}}", "{}", "{a} {b|c}", "x {a|b}", "{a|b"):
        assert not begins_with_choice(line)


# Seeds


def test_choices_are_the_same_on_every_machine() -> None:
    """Of whole numbers and SHA-256 alone; these values are written down, and no other version may have others."""
    texts = [drawn("a {red|green|blue} {cat|dog}, {2$$a|b|c|d} {3::x|y}", seed) for seed in (0, 1, 2, 2**64 - 1)]
    assert texts == FIXED


FIXED = [
    "a blue dog, a, b y",
    "a red dog, c, b y",
    "a green cat, d, c x",
    "a blue cat, b, d x",
]


@pytest.mark.parametrize("first", [0, 1, 777, 2**32 - 60, 2**64 - 60])
def test_seeds_in_a_row_choose_different_options_as_long_as_they_can(first: int) -> None:
    for count in (2, 3, 20, 50):
        options = "|".join(f"o{i}" for i in range(count))
        assert len({drawn(f"{{{options}}}", first + i) for i in range(min(count, 59))}) == min(count, 59)
    assert len({drawn("{a|b|c|d} {e|f|g|h|i} {k|l}", first + i) for i in range(40)}) == 40, "each combination once"


def test_later_choices_do_not_follow_from_the_first() -> None:
    """Pairs of two choices of twenty: as chance would have them, by chi-squared with 399 degrees of freedom."""
    options = "|".join(map(str, range(20)))
    seeds = random.Random(5).sample(range(2**32), 8000)
    pairs = Counter(drawn(f"{{{options}}} {{{options}}}", seed) for seed in seeds)
    chi = sum((pairs[f"{a} {b}"] - 20) ** 2 / 20 for a in range(20) for b in range(20))
    print(f"chi-squared {chi:.0f} of about 399, standard deviation 28")
    assert abs(chi - 399) < 4 * 28


def test_prompt_and_negative_prompt_choose_by_one_seed() -> None:
    asked = {"prompt": "{a|b}", "negative_prompt": "{c|d}", "steps": 3}
    made = [NONE.chosen(asked, seed) for seed in range(8)]
    for one in made:
        assert one["template"] == "{a|b}" and one["negative_template"] == "{c|d}" and one["steps"] == 3
    assert {one["prompt"] for one in made} == {"a", "b"} and {one["negative_prompt"] for one in made} == {"c", "d"}
    assert NONE.chosen(made[0], 99) == made[0], "what is chosen stays"


def test_several_are_a_permutation() -> None:
    every = {tuple(SeededChoices(seed).several(4, 4)) for seed in range(24)}
    assert len(every) == 24 and all(sorted(one) == [0, 1, 2, 3] for one in every)


# Attacks: every text ends in time, with a text or one line

HOSTILE = {
    "open braces": "{" * 100_000, "closed braces": "}" * 100_000, "nested text": "{" * 50_000 + "}" * 50_000,
    "unclosed choices": "{a|" * 33_000, "deep choices": "{a|" * 10_000 + "}" * 10_000, "backslashes": "\\" * 100_000,
    "underscores": "_" * 100_000, "names": "__a" * 33_000, "brackets": "[|" * 50_000, "mixed": "{[|" * 33_000 + "}",
    "quotes": '{"' * 50_000, "apostrophes": "{'" + " '" * 49_000, "bars": "{" + "|" * 99_000 + "}",
    "all of many": "{9999$$" + "|" * 90_000 + "}", "weighed": "{9999$$2::" + "|" * 90_000 + "}",
    "counts": "{2$$" * 25_000, "many choices": "{a|b}" * 20_000, "wildcards": "__a__" * 20_000,
    "digits": "{" + "9" * 99_000,
    "dollars": "{2$$" + "$" * 99_000 + "}", "separators": ("{2$$" + "s" * 190 + "$$a|b}") * 490,
    "long name": "__" + "a" * 99_000,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sample(5)
def test_a_hostile_text_ends_soon(name: str) -> None:
    begun = time.process_time()
    try:
        assert len(drawn(HOSTILE[name])) <= 100_000
    except UsageError as error:
        assert len(str(error)) <= 300 and str(error).isprintable()
    took = time.process_time() - begun
    print(f"{name}: {took:.2f} s")
    assert took < 5, "in proportion to the text: quadratic takes minutes"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("{a|" * (MAX_DEPTH + 1) + "}" * (MAX_DEPTH + 1), f"deeper than {MAX_DEPTH}"),
        ("{3-1$$a|b}", "begin with the smaller"),
        ("{0::a|0::b}", "weights are all 0"), ("{a|b}" * (MAX_CHOICES + 1), "more than 2,000 choices"),
        ("__a/../b__", "no .."), ("__a//b__", "no .."), ("__a*__", "no folder of wildcards"), ("__a__", r"\__a__"),
        ("{1900$$" + "s" * 200 + "$$" + "|" * 1900 + "}", "100,000 characters once"), ("{\ud800|b}", "not text"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(prompt: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        drawn(prompt)
    assert words in str(error.value) and len(str(error.value)) <= 300 and str(error.value).isprintable()
