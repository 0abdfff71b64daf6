"""The text that a language model writes, as it comes and when it is whole.

It is data: one line of text without control characters, and nothing in it is interpreted.
"""

from __future__ import annotations

import re
import unicodedata

THOUGHTS = ("<think>", "</think>")
_ENDS = ".!?。！？"  # of sentences
_CLOSING = "\"'”’»」』)）]"  # they belong to the sentence before them
_WIDE = "。！？"  # after these no blank follows
_LOST = "\ufffd"  # stands for bytes that are not UTF-8, at the end of a text for those of a character that is not whole
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji need them


def one_line(text: str) -> str:
    """Return `text` in NFC as one line: line breaks, control characters and marks that turn the direction of text
    become a blank, together with blanks around them."""
    marked = "".join("\0" if _is_unsafe(c) else c for c in text if c != _LOST)
    return unicodedata.normalize("NFC", re.sub(r"\s*\0[\s\0]*", " ", marked).strip())


def _is_unsafe(c: str) -> bool:
    return c not in _JOINERS and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def without_thoughts(text: str) -> str:
    """Return `text` without the thoughts before it; "" if it is still thinking."""
    begins, ends = THOUGHTS
    if ends in text:
        return text.rpartition(ends)[2]
    start = text.lstrip()[: len(begins)]
    return "" if start and begins.startswith(start) else text


def steady(text: str) -> str:
    """Return the part of a growing text that no further token changes: without a character whose bytes are not all
    there, and without the last one, to which marks may be added."""
    shown = one_line(without_thoughts(text.rstrip(_LOST)) + "|")[:-1].rstrip()
    last = len(shown) - 1
    while last > 0 and unicodedata.combining(shown[last]):
        last -= 1
    return shown[: max(last, 0)].rstrip()


def finished(text: str) -> str:
    """Return a whole text as it is used."""
    return one_line(without_thoughts(text))


def cut_at_sentence(text: str) -> str:
    """Return `text`, which was ended at a limit, up to the end of its last whole sentence; all of it if it has none."""
    for end in range(len(text), 0, -1):
        if text[end - 1] not in _ENDS:
            continue
        closed = end
        while closed < len(text) and text[closed] in _CLOSING:
            closed += 1
        if closed == len(text) or text[closed].isspace() or text[end - 1] in _WIDE:
            return text[:closed]
    return text
