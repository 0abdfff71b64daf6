"""SentencePiece's Unigram model: text to the ids of its most probable pieces.

Unusual here:

- a table replaces characters (`charsmap`), blanks are dropped, and each word begins with the character `▁`;
- a word is split into the pieces whose scores have the largest sum (A. Viterbi, 1967). A character that is no piece is
  unknown, at a score of 10 below the lowest; unknown characters side by side have one id;
- scores are added in float64, as the tokenizers library does. SentencePiece adds them in float32, over the whole text.

Source: T. Kudo, Subword Regularization (2018).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from qwenimg.common.base.text import clean
from qwenimg.common.prompts.charsmap import Charsmap, DamagedTable
from qwenimg.common.prompts.vocabulary import refuse, shown

SPACE = "▁"
MAX_PIECES = 2**18  # T5 has 32,000, multilingual ones 250,000
MAX_PIECE = 64  # characters; T5's longest has 16
MAX_SCORE = 1e38  # float32, so that the sum over a text is finite

_UNKNOWN_BELOW = 10.0  # the lowest score
_WORD = re.compile(f"{SPACE}[^{SPACE}]*")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a file: id and score of each text, and the id of an unknown one. `special`: ids by texts that are
    matched before a text is split, and that no piece has."""

    file: Path
    known: dict[str, tuple[int, float]]
    unknown: int
    special: dict[str, int]
    charsmap: Charsmap | None


class Unigram:
    """A model of these pieces."""

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._unknown_score = min(score for _, score in pieces.known.values()) - _UNKNOWN_BELOW
        self._longest: dict[str, int] = {}  # characters of the longest piece, by its first character
        for text in pieces.known:
            self._longest[text[0]] = max(len(text), self._longest.get(text[0], 0))

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`, in which special tokens are plain text. Raises ModelError for a damaged table of
        characters."""
        try:
            normalized = self._pieces.charsmap.apply(text) if self._pieces.charsmap else text
        except DamagedTable as error:
            refuse(self._pieces.file, f"its table of characters (charsmap) {error}")
        words = (f"{SPACE}{word}" for word in normalized.split(" ") if word)
        return [id for word in words for part in _WORD.findall(word) for id in self._split(part)]

    def _split(self, word: str) -> list[int]:
        """Return the ids of one word."""
        scores = [0.0] + [-inf] * len(word)  # of the best pieces up to each place
        last = [(0, 0)] * len(scores)  # the begin and the id of the last of them
        for begin, first in enumerate(word):
            alone = False
            for end in range(begin + 1, min(begin + self._longest.get(first, 0), len(word)) + 1):
                if (piece := self._pieces.known.get(word[begin:end])) is None:
                    continue
                id, score = piece
                alone = alone or end == begin + 1
                if scores[begin] + score > scores[end]:
                    scores[end], last[end] = scores[begin] + score, (begin, id)
            if not alone and scores[begin] + self._unknown_score > scores[begin + 1]:
                scores[begin + 1] = scores[begin] + self._unknown_score
                last[begin + 1] = (begin, self._pieces.unknown)
        return self._path(last)

    def _path(self, last: list[tuple[int, int]]) -> list[int]:
        """Return the ids on the way to the last place, of unknown ones side by side only one."""
        ids: list[int] = []
        end = len(last) - 1
        while end:
            end, id = last[end]
            if not (ids and id == ids[-1] == self._pieces.unknown):
                ids.append(id)
        return ids[::-1]


def checked(file: Path, pieces: Iterable[tuple[object, object]]) -> list[tuple[str, float]]:
    """Return texts and scores. Raises ModelError for what is no piece, and for a text that is there twice."""
    entries: dict[str, float] = {}
    for text, score in pieces:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_PIECE:
            refuse(file, f"has a piece that is not of 1 to {MAX_PIECE} characters ({shown(text)})")
        if type(score) not in (int, float) or not abs(score) < MAX_SCORE:  # type: ignore[arg-type]
            refuse(file, f"gives '{clean(text, 40)}' the score {clean(score, 40)}, which is no number")
        if text in entries:
            refuse(file, f"has the piece '{clean(text, 40)}' twice")
        entries[text] = float(score)  # type: ignore[arg-type]
    return list(entries.items())
