"""Names of files from prompts."""

from __future__ import annotations

import re
import sys
import unicodedata

_WINDOWS_DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]")


def slug(text: str, limit: int = 80) -> str:
    """A part of a file name from a prompt: letters and digits of every script, in lower case and NFC, words joined by
    hyphens, at most `limit` bytes of UTF-8; `image` if nothing is left. No name that Windows reserves.

    Where the file system's encoding has no such letters, what has an ASCII form is kept in it."""
    name = _cut(_words(text[: 20 * limit]), limit)
    try:
        name.encode(sys.getfilesystemencoding())
    except UnicodeEncodeError:
        ascii_only = unicodedata.normalize("NFKD", text[: 20 * limit]).encode("ascii", "ignore").decode()
        name = _cut(_words(ascii_only), limit)
    if _WINDOWS_DEVICE.fullmatch(name):
        name = f"image-{name}"
    return name or "image"


def _words(text: str) -> str:
    lower = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    kinds = [unicodedata.category(c) for c in lower]
    # Format characters (joiners, direction) go without a trace; what is neither letter, mark nor digit parts words.
    pairs = zip(lower, kinds, strict=True)
    kept = "".join(c if kind[0] in "LM" or kind == "Nd" else "" if kind == "Cf" else " " for c, kind in pairs)
    words = (word.lstrip("".join(c for c in set(word) if _is_mark(c))) for word in kept.split())
    return unicodedata.normalize("NFC", "-".join(filter(None, words)))


def _cut(name: str, limit: int) -> str:
    """At most `limit` bytes: whole words, where that leaves half of them, and no letter without its marks."""
    data = name.encode()
    if len(data) <= limit:
        return name
    cut = data[:limit].decode(errors="ignore")
    while cut and _is_mark(name[len(cut)]):
        cut = cut[:-1]
    whole = cut if name[len(cut)] == "-" else cut.rpartition("-")[0]
    return (whole if len(whole.encode()) > limit // 2 else cut).strip("-")


def _is_mark(c: str) -> bool:
    return unicodedata.category(c)[0] == "M"
