"""Embeddings of textual inversion in prompts: vectors that take the place of words.

- A prompt names one as `embedding:NAME` (ComfyUI), as the bare word NAME (the AUTOMATIC1111 web UI) or as the token of
  its file, such as `<cat>` (diffusers), in letters of either case; the longest name counts.
- `marked` puts one character of a private plane in the place of each, so that nothing in a name is read as brackets, a
  schedule or a weight, and the grammars of prompts need to know nothing of embeddings.
- An embedding of n vectors takes n tokens, and is not torn over the end of a chunk (`weighted`).

Source: R. Gal et al., "An Image is Worth One Word", 2022.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError

MOST = 100  # embeddings of a request
_FIRST = 0xF0000  # of the private plane
_MARKS = re.compile("([\U000f0000-\U000f0063])")  # MOST of them
_SUFFIX = r"(?:\.(?:pt|bin|safetensors))?"


@dataclass(frozen=True, kw_only=True)
class Inversion:
    """An embedding that was read: for each text encoder of a model, its vectors [N C]."""

    names: tuple[str, ...]  # by which prompts call it, its own first
    sha256: str  # of its file
    vectors: Mapping[str, NDArray[np.float32]] = field(compare=False, repr=False)  # by text encoder

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def count(self) -> int:
        """The number of its vectors."""
        return len(next(iter(self.vectors.values())))


def name_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of `names` in a prompt: group `name` has it, and group `prefix` an `embedding:` before it. A
    name that begins or ends with a letter, a digit or `_` begins or ends there."""
    spelled = "|".join(map(_spelled, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?P<prefix>(?<!\w)embedding:)?(?P<name>{spelled})(?(prefix){_SUFFIX})", re.IGNORECASE)


def _spelled(name: str) -> str:
    before, after = (edge * bool(re.match(r"\w", end)) for edge, end in ((r"(?<!\w)", name), (r"(?!\w)", name[-1:])))
    return f"{before}{re.escape(name)}{after}"


def marked(prompt: str, inversions: Sequence[Inversion]) -> str:
    """Return `prompt` with a mark in the place of each embedding. A marked prompt does not change."""
    if not inversions:
        return prompt
    marks = {name.lower(): chr(_FIRST + i) for i, one in reversed([*enumerate(inversions)]) for name in one.names}
    return name_pattern(marks).sub(lambda match: marks[match["name"].lower()], prompt)


def check_no_marks(prompt: str) -> None:
    """Raise UsageError for a prompt beside embeddings with a character that would be taken for a mark."""
    if found := _MARKS.search(prompt):
        shown = f"U+{ord(found[1]):X}"
        raise UsageError(
            f"the prompt has {shown}, a character for private use that stands for embeddings; leave it out"
        )


def used(prompt: str, inversions: Sequence[Inversion]) -> tuple[str, tuple[Inversion, ...]]:
    """Return a marked `prompt` with its marks counted anew, and the embeddings that it has, in order."""
    if not inversions:
        return prompt, ()
    found = dict.fromkeys(_MARKS.findall(prompt))
    numbers = {mark: chr(_FIRST + i) for i, mark in enumerate(found)}
    return _MARKS.sub(lambda match: numbers[match[1]], prompt), tuple(inversions[ord(mark) - _FIRST] for mark in found)


def pieces(text: str) -> list[str | int]:
    """Split a marked text into plain texts and the numbers of embeddings."""
    return [ord(part) - _FIRST if _MARKS.fullmatch(part) else part for part in _MARKS.split(text) if part]
