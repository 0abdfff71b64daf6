"""The check of SentencePiece's table of characters: texts of one or more characters, each with its replacement.

Such a table is a trie of the UTF-8 bytes of its texts in a "double array", and the replacements, each with a zero byte
at its end. A word of the array has the way to its children, the byte that leads to it, and whether a text ends there.
The tokenizers library walks it, and ends the process's turn with a panic where a way leads out of the table; so every
way is checked before.

Source: S. Yata, darts-clone; T. Kudo, SentencePiece (`normalizer.cc`).
"""

from __future__ import annotations

from struct import unpack_from

MAX_BYTES = 1 << 20  # of a table; that of NFKC has 240,007
MAX_REPLACEMENT = 256  # bytes; NFKC's longest has 33

_LEADS_NOWHERE = 1 << 31  # set in a word that holds a place
_ENDS = 1 << 8
_LAST = 0xFF  # children lie in one block of 256 words, by their bytes


class DamagedTable(ValueError):
    """The fault of a table of characters, as the end of a sentence."""


def check(raw: bytes) -> None:
    """Check that no text leads out of the table `raw`. Raises DamagedTable."""
    if len(raw) > MAX_BYTES:
        raise DamagedTable(f"has {len(raw)} bytes, at most {MAX_BYTES} are read")
    size = unpack_from("<I", raw)[0] if len(raw) >= 4 else 0
    if not size or size % 4 or size > len(raw) - 4:
        raise DamagedTable(f"has a trie of {size} bytes in {len(raw)} bytes")
    words: tuple[int, ...] = unpack_from(f"<{size // 4}I", raw, 4)
    texts = raw[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise DamagedTable("has a text that is not UTF-8") from None
    for index, word in enumerate(words):
        if word & _LEADS_NOWHERE:
            continue
        children = index ^ (word >> 10) << ((word & 1 << 9) >> 6)
        if children | _LAST >= len(words):
            raise DamagedTable(f"has a trie of {len(words)} words that leads to word {children | _LAST}")
        if word & _ENDS:
            _check_replacement(texts, words[children] & ~_LEADS_NOWHERE)


def _check_replacement(texts: bytes, place: int) -> None:
    if texts.find(b"\0", place, place + MAX_REPLACEMENT) < 0:
        raise DamagedTable(f"has a replacement at byte {place} of {len(texts)} that does not end")
    if texts[place] & 0xC0 == 0x80:
        raise DamagedTable(f"has a replacement at byte {place} that begins within a character")
