"""The prompt syntax of web UIs in every family: drawn by Stable Diffusion, named in a warning by all others.

Stable Cascade, whose text encoder is a CLIP, has weights and BREAK."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.family_cases import ASKED, FIRST, opener

SYNTAX = ("a [red:blue:0.5] circle", "a [red|blue] circle", "a red circle AND a dog :0.5", "a circle BREAK a dog")
TEXT = "a red circle (x) [y] at 10:30, a sign 'SALT AND PEPPER'"


@pytest.mark.parametrize("family", FIRST)
def test_it_is_drawn_or_named(tiny: dict[str, Path], family: str) -> None:
    pipe = opener(FIRST[family], tiny[FIRST[family]], tiny)("cpu")
    for prompt in SYNTAX:
        lines = pipe.model.warnings(pipe.check(prompt, **ASKED))
        named = [line for line in lines if "as words" in line]
        read = family == "stable-diffusion" or (family == "cascade" and "BREAK" in prompt)
        assert len(named) == (not read), lines
        assert all(len(line) <= 300 and "sentence" in line for line in named)
    assert not any("as words" in line for line in pipe.model.warnings(pipe.check(TEXT, **ASKED)))
