"""Prompts in several parts, each with a weight: `a cat AND a dog :0.5`, as users of Stable Diffusion write them.

A step predicts each part alone, and the results are summed: unconditional + sum of weight (part - unconditional), to
which guidance is applied. Source: N. Liu et al., "Compositional Visual Generation with Composable Diffusion Models",
2022, as in the AUTOMATIC1111 web UI. As there, AND splits a prompt before anything else in it is read. A weight is read
only in a prompt with AND: `a clock at 10:30` has none, where the web UI takes 30."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwenimg.common.base.errors import UsageError

MAX_PARTS = 16  # each is one more call of the network in every step
MAX_WEIGHT = 100.0

_AND = re.compile(r"\bAND\b")
_WEIGHT = re.compile(r"[-+]?(?:\d+\.?|\d*\.\d+)")


@dataclass(frozen=True)
class Part:
    """A part of a prompt, and its weight in the sum."""

    text: str
    weight: float = 1.0


def parts(prompt: str) -> tuple[Part, ...]:
    """Split `prompt` at AND; a prompt without it is one part of weight 1. Raises UsageError."""
    texts = _AND.split(prompt)
    if len(texts) > MAX_PARTS:
        raise UsageError(f"the prompt has {len(texts)} parts between AND, at most {MAX_PARTS} are drawn together")
    return tuple(map(_part, texts)) if len(texts) > 1 else (Part(prompt),)


def _part(text: str) -> Part:
    text = text.rstrip()
    before, colon, after = text.rpartition(":")
    if not colon or not _WEIGHT.fullmatch(after.lstrip()):
        return Part(text)
    weight = float(after)
    if abs(weight) > MAX_WEIGHT:
        raise UsageError(
            f"the prompt has a part of weight {weight:g} beside AND; give -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    return Part(before.rstrip(), weight)
