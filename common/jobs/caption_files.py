"""The pictures that are to be described, and the text files beside them, as trainers of LoRAs read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwenimg.common.base import atomic_files
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import absolute, bad, is_file, is_folder
from qwenimg.common.base.text import clean, shown_path

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of pictures in a folder
MOST_LISTED = 1_000_000  # entries of a folder


@dataclass(frozen=True, kw_only=True)
class CaptionFile:
    """A picture, and the file for its text."""

    picture: Path
    text: Path

    def write(self, text: str, *, overwrite: bool) -> None:
        """Write the file, whole or not at all; a link in its place is replaced, not followed. Raises UsageError and
        DoesNotFit."""
        atomic_files.write_atomic(self.text, f"{text}\n".encode(), overwrite=overwrite)


def find(places: Sequence[Path]) -> list[CaptionFile]:
    """Return the pictures that `places` name: files, and folders with pictures, in the order of their names. Raises
    ModelError for a folder without pictures or one that cannot be read."""
    pictures: dict[Path, None] = {}
    for place in places:
        pictures |= dict.fromkeys(map(absolute, _in_folder(place) if is_folder(place) else [place]))
    return [CaptionFile(picture=one, text=one.with_suffix(".txt")) for one in pictures]


def unwritten(files: Sequence[CaptionFile], named: Iterable[Path], *, overwrite: bool) -> list[CaptionFile]:
    """Return the `files` whose texts are to be written: without `overwrite` those of a folder that have none yet. The
    texts of pictures that are `named` must not be there. Raises UsageError, before any is written."""
    _check_distinct(files)
    ours = set(map(absolute, named))
    new = [one for one in files if overwrite or one.picture in ours or not os.path.lexists(one.text)]
    for one in new:
        atomic_files.check_output(one.text, overwrite=overwrite)
    return new


def _check_distinct(files: Sequence[CaptionFile]) -> None:
    first: dict[Path, Path] = {}
    for one in files:
        if (other := first.setdefault(one.text, one.picture)) != one.picture:
            names = f"{clean(other.name, 60)} and {clean(one.picture.name, 60)}"
            raise UsageError(f"{shown_path(one.text)}: would be the text of {names}; rename one of them")


def _in_folder(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(MOST_LISTED), strict=False))
    except OSError as error:
        raise ModelError(f"{shown_path(folder)}: cannot be read: {clean(error.strerror or error, 80)}") from None
    named = [folder / name for name in names if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
    if not (pictures := [path for path in named if is_file(path)]):
        raise bad(folder, f"has no pictures ({' '.join(SUFFIXES)}); give the folder that they are in")
    return pictures
