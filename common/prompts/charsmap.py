"""SentencePiece's table of characters: texts of one or more characters, each with its replacement.

Such a table is a trie of the UTF-8 bytes of its texts in a "double array", and the replacements, each with a zero byte
at its end. A word of the array has the way to its children, the byte that leads to it, and whether a text ends there.
That of NFKC has a quarter of a million texts, which share their ends, so it is walked and never listed. It is not
trusted: a way out of it is an error, once a prompt leads there.

Source: S. Yata, darts-clone; T. Kudo, SentencePiece (`normalizer.cc`).
"""

from __future__ import annotations

from struct import unpack_from

MAX_BYTES = 1 << 20  # of a table; that of NFKC has 240,007
MAX_TEXT = 64  # bytes of a text that is replaced; NFKC's longest has 12
MAX_REPLACEMENT = 256  # bytes; NFKC's longest has 33

_LABEL = 0x800000FF  # the highest bit is set in a word that holds a place and leads nowhere
_ENDS = 1 << 8
_PLACE = 0x7FFFFFFF


class DamagedTable(ValueError):
    """The fault of a table of characters, as the end of a sentence."""


class Charsmap:
    """The replacements of a table, by its bytes. Raises DamagedTable."""

    def __init__(self, raw: bytes):
        if len(raw) > MAX_BYTES:
            raise DamagedTable(f"has {len(raw)} bytes, at most {MAX_BYTES} are read")
        size = unpack_from("<I", raw)[0] if len(raw) >= 4 else 0
        if not size or size % 4 or size > len(raw) - 4:
            raise DamagedTable(f"has a trie of {size} bytes in {len(raw)} bytes")
        self._words: tuple[int, ...] = unpack_from(f"<{size // 4}I", raw, 4)
        self._texts = raw[4 + size :]

    def apply(self, text: str) -> str:
        """Return `text` with the longest text of the table replaced at each place, from the left. Raises
        DamagedTable."""
        raw, parts, at = text.encode(), list[bytes](), 0
        while at < len(raw):
            size, place = self._longest(raw, at)
            if place is None:
                size = _width(raw[at])
                parts.append(raw[at : at + size])
            else:
                parts.append(self._replacement(place))
            at += size
        try:
            return b"".join(parts).decode()
        except UnicodeDecodeError:
            raise DamagedTable("has a text that is not UTF-8") from None

    def _longest(self, raw: bytes, at: int) -> tuple[int, int | None]:
        """Return the length of the longest text of the table at `at`, and the place of its replacement, or None."""
        words, index = self._words, 0
        longest: tuple[int, int | None] = (0, None)
        for i in range(at, min(at + MAX_TEXT, len(raw))):
            index = _child(words, index, raw[i])
            if not raw[i] or words[index] & _LABEL != raw[i]:
                break
            if words[index] & _ENDS:
                longest = (i + 1 - at, words[_child(words, index, 0)] & _PLACE)
        return longest

    def _replacement(self, place: int) -> bytes:
        end = self._texts.find(b"\0", place, place + MAX_REPLACEMENT)
        if end < 0:
            raise DamagedTable(f"has a replacement at byte {place} of {len(self._texts)} that does not end")
        return self._texts[place:end]


def _child(words: tuple[int, ...], index: int, byte: int) -> int:
    """Return the index to which `byte` leads from the word at `index`. The word there need not be its child."""
    word = words[index]
    child = index ^ (word >> 10) << ((word & 1 << 9) >> 6) ^ byte
    if child >= len(words):
        raise DamagedTable(f"has a trie of {len(words)} words that leads to word {child}")
    return child


def _width(first: int) -> int:
    """Return the number of bytes of a character by its `first` one."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
