"""The one folder that an assistant may read pictures from and that its pictures are written to."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from qwenimg.common.base.atomic_files import make_folder
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.safe_files import OpenFile, in_memory
from qwenimg.common.base.text import clean, shown_path

MOST_BYTES = 32 << 20  # of a picture in base64
MOST_NAME = 100  # bytes of the name of a new file, without number and ending
_TRIES = 1000  # names with a number, until one is free
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{MOST_NAME - 1}}}", re.ASCII)
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII)


class Folder:
    """A folder by its real path, in which every name of a client stays."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is not there. Raises UsageError."""
        make_folder(path)
        self.path = path.resolve()

    def picture(self, name: object, field: str) -> Path:
        """Return the path of the file that a client names, relative to the folder. Raises UsageError for one that is
        elsewhere, also by a link."""
        if not isinstance(name, str) or not name or len(name) > 1000:
            raise UsageError(f"{field} is {clean(name, 40)}; give the name of a picture in the folder")
        given = Path(name)
        try:
            path = (self.path / given).resolve()
            inside = not given.is_absolute() and ".." not in given.parts and self.path in path.parents
        except (OSError, ValueError, RuntimeError):  # a circle of links, a null byte, half of a surrogate pair
            inside = False
        if not inside:
            raise UsageError(f"{field} {clean(name, 60)!r} is not in the folder; give the name of a picture in it")
        return path

    def free_name(self, stem: str, ending: str = ".png") -> Path:
        """Return the path of a new file. Raises UsageError if too many have the name."""
        for number in range(_TRIES):
            path = self.path / f"{stem}{f'-{number + 1}' if number else ''}{ending}"
            if not path.exists() and not path.is_symlink():
                return path
        raise UsageError(f"{clean(stem, 60)}: {_TRIES} files have this name; give another")

    def public(self, text: str) -> str:
        """Return a message in which files of the folder have their names in it."""
        return text.replace(f"{self.path}/", "").replace(f"{shown_path(self.path)}/", "")


def decoded(value: object, field: str) -> OpenFile:
    """Return the file in base64, with or without the head of a data URL. Raises UsageError."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{field} is no text in base64")
    if len(value) > MOST_BYTES * 4 // 3 + 100:
        raise UsageError(f"{field} has more than {MOST_BYTES >> 20} MB; put the picture into the folder and name it")
    head = _DATA_URL.match(value)
    try:
        data = base64.b64decode(value[head.end() :] if head else value, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"{field} is no picture in base64; addresses are not fetched") from None
    return in_memory(field, data)


def stem_of(name: object, prompt: str) -> str:
    """Return the name of new files, without ending: the one that a client gives, or words of the prompt. Raises
    UsageError."""
    from qwenimg.common.jobs.naming import slug

    if name is None:
        return slug(prompt, 60)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"name is {clean(name, 40)!r}; give letters, digits, - and _, without a folder or an ending")
    return name
