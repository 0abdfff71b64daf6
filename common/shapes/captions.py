"""Captions under pictures: a font of this machine that has their letters, and else what they say in English."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.shapes.words import Parsed, Thing

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

# With Chinese among their letters, the more readable first; names as Linux, macOS and Windows have them.
FONTS = (
    *("NotoSansCJK-Regular.ttc", "NotoSansSC-Regular.otf", "NotoSansCJKsc-Regular.otf", "SourceHanSansSC-Regular.otf"),
    *("PingFang.ttc", "Hiragino Sans GB.ttc", "STHeiti Light.ttc", "Arial Unicode.ttf", "Songti.ttc"),
    *("msyh.ttc", "msyh.ttf", "simhei.ttf", "simsun.ttc", "wqy-microhei.ttc", "wqy-zenhei.ttc"),
    *("DroidSansFallbackFull.ttf", "DroidSansFallback.ttf", "uming.ttc", "ukai.ttc", "unifont.otf", "unifont.ttf"),
)
SIZE = 10  # pixels, as Pillow's own
NOWHERE = "\U0010ffff"  # no font has it: what is drawn for it stands for every missing letter


def font_for(text: str, folders: Iterable[Path] | None = None) -> FreeTypeFont | None:
    """A font of this machine with every letter of `text`, or None."""
    found = _found(tuple(_folders() if folders is None else folders))
    return next((font for font in map(_open, found) if font is not None and has_all(font, text)), None)


def has_all(font: FreeTypeFont, text: str) -> bool:
    """Whether the font draws each letter of `text` as something of its own."""
    missing = bytes(font.getmask(NOWHERE))
    return all(bytes(font.getmask(letter)) not in (missing, b"") for letter in set(text) if not letter.isspace())


def _open(path: Path) -> FreeTypeFont | None:
    from PIL import ImageFont

    try:
        return ImageFont.truetype(str(path), SIZE)
    except OSError:
        return None


@cache
def _found(folders: tuple[Path, ...]) -> list[Path]:
    """The known fonts in `folders` and below, in the order of `FONTS`."""
    named: dict[str, Path] = {}
    for folder in folders:
        for at, _, names in os.walk(folder):
            for name in set(names).intersection(FONTS):
                named.setdefault(name, Path(at, name))
    return [named[name] for name in FONTS if name in named]


def _folders() -> Iterator[Path]:
    home = Path.home()
    if sys.platform == "darwin":
        yield from (Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library" / "Fonts")
    elif sys.platform == "win32":
        yield Path(os.environ.get("SYSTEMROOT", "C:\\Windows"), "Fonts")
    else:
        yield from (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), home / ".local" / "share" / "fonts")
        yield home / ".fonts"


# In English


def english(asked: Parsed) -> str | None:
    """What a prompt asks for, in English: `two yellow stars on a black background`. None where it names no shape."""
    if not asked.things:
        return None
    first, *others = (_noun(thing) for thing in asked.things)
    text = " and ".join([first, *others])
    if asked.relation not in (None, "and") and others:
        text = f"{first} {asked.relation} {others[0]}"
    if asked.position:
        where = {"center": "in the center", "top": "at the top", "bottom": "at the bottom"}
        text += " " + where.get(asked.position, f"on the {asked.position}")
    return f"{text} on {_article(asked.background)} background" if asked.background else text


def _noun(thing: Thing) -> str:
    words = " ".join(word for word in (thing.size, thing.color, thing.shape) if word)
    if thing.count == 1:
        return _article(words)
    plural = words + ("es" if words.endswith(("s", "x")) else "s")
    count = {None: "", 2: "two ", 3: "three "}.get(thing.count, f"{thing.count} ")
    return count + plural


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"
