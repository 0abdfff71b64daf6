"""A font of this machine that has the letters of a caption."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from PIL import ImageFont
from PIL.ImageFont import FreeTypeFont

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
