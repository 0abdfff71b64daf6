"""SentencePiece's Unigram model as the tokenizers library computes it: text to the ids of its most probable pieces.

Unusual here:

- a table replaces characters (`charsmap`), blanks are dropped, and each word begins with the character `▁`;
- the library replaces a cluster of characters, such as a letter with its marks, as a whole where the table has its
  beginning, and so drops marks that SentencePiece keeps. T5's models in diffusers see its ids;
- a special token's text that only the table makes, such as one in wide letters, is its piece.

Source: T. Kudo, Subword Regularization (2018).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.text import clean
from qwenimg.common.prompts import charsmap
from qwenimg.common.prompts.charsmap import DamagedTable
from qwenimg.common.prompts.vocabulary import refuse, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"
MAX_PIECES = 2**18  # T5 has 32,100, mT5 250,100
MAX_PIECE = 64  # characters; T5's longest has 16
MAX_LENGTH = 2**21  # characters of all pieces, of which each may take 1 kB of memory; T5's have 219,822
MAX_SCORE = 1e38  # float32, so that the sum over a text is finite


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces of a file with their scores, in the order of their ids, and the id of an unknown one. `special`: ids
    by texts that are matched before a text is split; charsmap: the table of characters, checked;
    bytes: whether an unknown character is the pieces of its bytes."""

    file: Path
    scores: list[tuple[str, float]]
    unknown: int
    special: dict[str, int]
    charsmap: bytes
    bytes: bool = False


def build(pieces: Pieces) -> Tokenizer:
    """Return the library's tokenizer with these pieces, in which special tokens are plain text."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    tokenizer = Tokenizer(Unigram(pieces.scores, unk_id=pieces.unknown, byte_fallback=pieces.bytes))
    if pieces.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(pieces.charsmap)
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    return tokenizer


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
    if (length := sum(map(len, entries))) > MAX_LENGTH:
        refuse(file, f"has pieces of {length} characters together, at most {MAX_LENGTH} are read")
    return list(entries.items())


def checked_table(file: Path, raw: bytes) -> bytes:
    """Return a table of characters. Raises ModelError for a damaged one."""
    try:
        charsmap.check(raw)
    except DamagedTable as error:
        refuse(file, f"its table of characters (charsmap) {error}")
    return raw
