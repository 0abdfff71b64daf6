"""The prompt syntax of the AUTOMATIC1111 web UI, against what its published grammar gives.

`tests/data/web_prompts.json` was made with it once, and none of it is ours: `schedules` by the lark grammar, in lark
1.1.2 and 1.3.1 with six orders of sets each (of 426 prompts, seven with brackets that are read in several ways by it
were left out), for so many calls; `weights` and `parts` by its expressions. Rows are [prompt, calls, [[last, text]]],
[prompt, [[text, weight]]] and the same again.
"""

from __future__ import annotations

import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base.errors import UsageError
from qwenimg.common.prompts import composed, scheduled, web_syntax, weighted

DATA: dict[str, list[Any]] = json.loads((Path(__file__).parent.parent / "data" / "web_prompts.json").read_text())


def test_schedules_and_alternations() -> None:
    different = 0
    for prompt, calls, texts in DATA["schedules"]:
        assert [[one.last, one.text] for one in scheduled.texts(prompt, calls)] == texts, prompt
        different += len(texts) > 1
        assert scheduled.changes(prompt) or len(texts) == 1
    print(f"{len(DATA['schedules'])} prompts, {different} of them with several texts")
    assert len(DATA["schedules"]) > 400 and different > 250


def test_weights_in_brackets_that_nest_and_cross() -> None:
    """Where the web UI's expression fails, as in (a:1.2.3), there is no row."""
    for prompt, published in DATA["weights"]:
        is_break = [part == ["BREAK", -1] for part in published]
        runs = groupby(zip(is_break, published, strict=True), lambda pair: pair[0])
        sections = [[part for _, part in run if part[0]] for broken, run in runs if not broken]
        found = [[list(part) for part in section] for section in weighted.parse(prompt)]
        assert [[text for text, _ in section] for section in found] == [[t for t, _ in one] for one in sections], prompt
        for ours, theirs in zip(found, sections, strict=True):
            assert [weight for _, weight in ours] == pytest.approx([weight for _, weight in theirs], rel=1e-12), prompt
    assert len(DATA["weights"]) > 200


def test_a_break_in_brackets_ends_a_chunk() -> None:
    """The web UI would read it as a word of weight -1.2 here, which nobody means."""
    assert weighted.parse("(a BREAK b:1.2)") == [[("a", 1.2)], [("b", 1.2)]]


def test_parts() -> None:
    for prompt, published in DATA["parts"]:
        found = [[part.text, part.weight] for part in composed.parts(prompt)]
        assert found == (published if len(published) > 1 else [[prompt, 1.0]]), prompt
    assert composed.parts("a clock at 10:30") == (composed.Part("a clock at 10:30"),)


def test_calls_beyond_the_last_have_the_last_text() -> None:
    """The first call has number 0, so that the first text has one more."""
    texts = scheduled.texts("[a|b]", 4)
    assert [scheduled.text_at(texts, call) for call in range(7)] == list("aababbb")
    texts = scheduled.texts("[a:b:2]", 4)
    assert [scheduled.text_at(texts, call) for call in range(5)] == list("aaabb")


@pytest.mark.parametrize("when", ["1e999", "-1e999", "9" * 400, "0." + "0" * 400, "1e-999", "-0.0"])
def test_numbers_without_bounds(when: str) -> None:
    texts = scheduled.texts(f"[a:b:{when}]", 10)
    assert {one.text for one in texts} <= {"a", "b"} and texts[-1].last == 10


@settings(max_examples=300)
@given(st.text(alphabet="ab [](){}:|\\.\n3-e", max_size=40), st.integers(1, 12))
def test_no_text_fails(prompt: str, calls: int) -> None:
    texts = scheduled.texts(prompt, calls)
    lasts = [one.last for one in texts]
    assert lasts == sorted(set(lasts)) and lasts[-1] == calls
    assert scheduled.changes(prompt) or texts[0].text == prompt
    composed.parts(prompt)
    web_syntax.warning(prompt)


PATTERNS = [
    "(",
    "[",
    "]",
    "[|",
    "[a|",
    "[a:",
    "[a:b:1]",
    "|",
    ":",
    "\\",
    "[[a|b]:",
    " ",
    "a AND ",
    " :1",
    "BREAK ",
    "\n",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sample(1)
def test_long_prompts_take_no_time(pattern: str) -> None:
    prompt = (pattern * 100_000)[:99_000] + "[a|b]" + "]" * 900
    start = time.process_time()
    for read in (lambda: scheduled.texts(prompt, 50), lambda: composed.parts(prompt), lambda: weighted.parse(prompt)):
        try:
            read()
        except UsageError as error:
            print(error)
            assert len(str(error)) <= 300 and "\n" not in str(error)
    web_syntax.warning(prompt)
    seconds = time.process_time() - start
    print(f"{pattern!r}: {seconds:.2f} s")
    assert seconds < 5  # measured at most 0.5


def test_the_most_changes_in_the_most_calls() -> None:
    start = time.process_time()
    nested = "[a:" * 250 + "b" + ":2.]" * 250
    assert scheduled.texts(nested + "[c|d]" * 250, 2000)[-1].text == "a" + "d" * 250
    seconds = time.process_time() - start
    print(f"{seconds:.2f} s")
    assert seconds < 10  # measured 1
    long = scheduled.texts("x" * 90_000 + "[a|b]", 2000)
    assert len(long) == 2000 and len({id(one.text) for one in long}) == 2, "two strings, not 180 MB"


# Other families

READ_AS_WORDS = {
    "a [red|blue] cat": "[red|blue]",
    "a [red:blue:0.5] cat, (x)": "[red:blue:0.5]",
    "[a::3]": "[a::3]",
    "a (cat:1.3)": "(cat:1.3)",
    "a cat AND a dog": "AND",
    "a cat BREAK a dog": "BREAK",
    "a" + "[a|b]" * 600: "[...|...]",
}
TEXT = [
    "a sign: 'SALT AND PEPPER'",
    "COFFEE BREAK",
    "at 10:30",
    "(note: 3 cats)",
    "a [b] (c)",
    "land AN D",
    "x | y",
    "",
]


def test_models_that_read_words_warn_of_the_syntax() -> None:
    for prompt, found in READ_AS_WORDS.items():
        line = web_syntax.warning(prompt)
        assert line is not None and f"reads {found} as words" in line and len(line) <= 300 and "\n" not in line
    assert [text for text in TEXT if web_syntax.warning(text)] == []
