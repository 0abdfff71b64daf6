"""The one folder in which all files are that a client may name."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.atomic_files import make_folder
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean, shown_path

_TRIES = 1000  # names with a number, until one is free


class Folder:
    """A folder by its real path, in which every name of a client stays."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is not there. Raises UsageError."""
        make_folder(path)
        self.path = path.resolve()

    def inside(self, name: object, field: str, what: str = "a picture") -> Path:
        """Return the path of `what` a client names, relative to the folder. Raises UsageError for one that is
        elsewhere, also by a link."""
        if not isinstance(name, str) or not name or len(name) > 1000:
            raise UsageError(f"{field} is {clean(name, 40)}; give the name of {what} in the folder")
        given = Path(name)
        try:
            path = (self.path / given).resolve()
            inside = not given.is_absolute() and ".." not in given.parts and self.path in path.parents
        except (OSError, ValueError, RuntimeError):  # a circle of links, a null byte, half of a surrogate pair
            inside = False
        if not inside:
            raise UsageError(f"{field} {clean(name, 60)!r} is not in the folder; give the name of {what} in it")
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
        return public(self.path, text)


def public(folder: Path, text: str) -> str:
    """Return a message in which files of a folder, by its real path, have their names in it; nothing is looked up."""
    root = f"{folder}/"
    text = text.replace(root, "").replace(f"{shown_path(folder)}/", "")
    for length in range(len(root) - 1, 0, -1) if "…" in text else ():  # a long path has lost its start
        text = text.replace(f"…{root[-length:]}", "")
    return text
