"""A folder of pictures to learn from, with their captions: found, checked, and never changed.

- A picture's caption is `NAME.txt`, or its line in `metadata.jsonl` (`file_name`, `text`), else the word of the run.
- A folder called `20_word class` inside, as for kohya's programs, has pictures that are taken 20 times each, whose
  caption is `word class` where they have none of their own.
- Pairs for a model that edits: `source/NAME` and `target/NAME`, or `source` in a line of `metadata.jsonl`.

The files are of unknown origin. Each is opened once, as a regular file, and is small, or refused in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.safe_files import bad, is_file, is_folder, open_regular
from qwenimg.common.base.strict_json import strict_json
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.pictures.input import read_upright_size
from qwenimg.common.prompts.check import check_prompt

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
METADATA, SOURCE, TARGET = "metadata.jsonl", "source", "target"
MAX_CAPTION = 16 << 10  # bytes: the longest text that any model reads is a tenth of it
MAX_METADATA = 64 << 20  # bytes
MAX_PICTURES = 100_000
MAX_REPEATS = 1_000
_REPEATED = re.compile(r"(\d{1,4})_(.+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of the folder. `source`: the one that a model which edits sees."""

    path: Path
    size: tuple[int, int]  # width and height, upright
    caption: str
    captioned: bool  # by a text of its own
    repeats: int = 1
    source: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The pictures of a folder, in the order of their names, and a line for each oddity that changes nothing else."""

    path: Path
    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()

    @property
    def taken(self) -> int:
        """The number of pictures in one round, with repeats."""
        return sum(one.repeats for one in self.pictures)


def read_folder(path: Path, word: str = "", *, pairs: bool = False) -> Folder:
    """Return the pictures below `path`. word: the caption of those without one. pairs: each needs a source, and else
    none has one. Raises ModelError and UsageError."""
    if not is_folder(path):
        what = "is a file" if is_file(path) else "no such folder"
        raise ModelError(f"--data {shown_path(path)}: {what}; give a folder of pictures with their captions")
    found, notes = list[Picture](), list[str]()
    for folder, repeats, words in _folders(path):
        for picture in _pictures(folder, repeats, words or word, notes, unused=words):
            found.append(picture)
            if len(found) > MAX_PICTURES:
                raise bad(path, f"holds more than {MAX_PICTURES:,} pictures")
    if not found:
        raise bad(path, f"holds no picture ({', '.join(SUFFIXES)})")
    _check_pairs(path, found, pairs)
    bare = [one for one in found if not one.caption]
    if bare:
        several = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
        named = f"{clean(bare[0].path.name, 60)}{several}"
        text = clean(bare[0].path.with_suffix(".txt").name, 60)
        raise UsageError(f"{named}: no caption; write {text}, or give --word WORD for all")
    return Folder(path=path, pictures=tuple(found), notes=tuple(notes))


def _folders(path: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield the folders with pictures, with the repeats and the words of each: `path`, its target folder, and those
    that are called `20_word`."""
    yield path, 1, ""
    for folder in sorted(_entries(path)):
        match = _REPEATED.fullmatch(folder.name)
        if folder.name != TARGET and match is None:
            continue
        if not is_folder(folder):
            continue
        if _is_link(folder):
            raise bad(folder, "is a link to a folder; give that folder itself, or copy it")
        if match is None:
            yield folder, 1, ""
            continue
        repeats = int(match[1])
        if not 1 <= repeats <= MAX_REPEATS:
            raise bad(folder, f"asks for {repeats} repeats; 1 to {MAX_REPEATS:,} are taken")
        yield folder, repeats, _checked(folder, " ".join(match[2].replace("_", " ").split()))


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder but hidden ones, such as macOS's `._a.jpg`."""
    try:
        yield from (path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise bad(folder, f"cannot be listed: {error.strerror}") from None


def _is_link(path: Path) -> bool:
    return os.path.islink(path)  # noqa: PTH114 (Path's raises for a name that is too long)


def _pictures(folder: Path, repeats: int, words: str, notes: list[str], *, unused: str) -> Iterator[Picture]:
    """Yield the pictures of one folder."""
    entries = sorted(_entries(folder))
    listed = _metadata(folder) if folder / METADATA in entries else {}
    names = {path.name for path in entries}
    if missing := [name for name in listed if not is_file(folder / name)]:
        raise bad(folder / METADATA, f"names {clean(missing[0], 60)}, which is no file here")
    own = 0
    for path in entries:
        if path.suffix.lower() not in SUFFIXES or is_folder(path):
            continue
        line = listed.get(path.name)
        text = path.with_suffix(".txt")
        if text.name in names and line is not None:
            raise bad(text, f"is a second caption of {clean(path.name, 60)}, which has a line in {METADATA}; keep one")
        caption = line.text if line is not None else _caption(text) if text.name in names else ""
        own += bool(caption)
        yield Picture(
            path=path,
            size=read_upright_size(path),
            caption=caption or words,
            captioned=bool(caption),
            repeats=repeats,
            source=_source(path, line),
        )
    if own and unused:
        notes.append(f"{clean(folder.name, 60)}: the words of its name are unused where pictures have captions ({own})")


# Captions


@dataclass(frozen=True)
class _Line:
    text: str
    source: str = ""


def _caption(path: Path) -> str:
    """Return the text of a caption file."""
    return _checked(path, _text(path, MAX_CAPTION).strip())


def _text(path: Path, most: int) -> str:
    """Return a file of UTF-8, with a byte order mark or without."""
    with closing(open_regular(path)) as file:
        if file.size > most:
            raise bad(path, f"has {file.size:,} bytes; at most {most:,} are read: is it a caption?")
        raw = file.read(0, file.size)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad(path, f"is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def _checked(path: Path, text: str) -> str:
    if (wrong := next((c for c in text if not (c.isprintable() or c in "\n\t\r")), None)) is not None:
        raise bad(path, f"has the character {clean(wrong)!r}, which is no text; remove it")
    try:
        check_prompt(text)
    except UsageError as error:
        raise bad(path, str(error)) from None
    return " ".join(text.split())


def _metadata(folder: Path) -> dict[str, _Line]:
    """Return the captions of `metadata.jsonl` by the names of the pictures."""
    path, lines = folder / METADATA, dict[str, _Line]()
    for number, row in enumerate(_text(path, MAX_METADATA).splitlines(), 1):
        if not row.strip():
            continue
        where = f"{path} (line {number})"
        data = strict_json(row.encode(), where, depth=3, values=200, halves=False)
        if not isinstance(data, dict):
            raise bad(where, "is not a JSON object")
        name, text, source = (data.get(key, "") for key in ("file_name", "text", SOURCE))
        for key, value in (("file_name", name), ("text", text), (SOURCE, source)):
            if not isinstance(value, str):
                raise bad(where, f"its {key} is {clean(value, 30)}, not a text")
        _check_name(where, name)
        if source:
            _check_name(where, source.removeprefix(f"{SOURCE}/"))
        if len(text.encode()) > MAX_CAPTION:
            raise bad(where, f"its text has more than {MAX_CAPTION:,} bytes")
        if name in lines:
            raise bad(where, f"names {clean(name, 60)} a second time")
        lines[name] = _Line(_checked(Path(where), text.strip()), source)
    return lines


def _check_name(where: str, name: object) -> None:
    """Raise ModelError unless `name` is a picture's in the same folder."""
    if not isinstance(name, str) or not name or name in (".", "..") or set(name) & {"/", "\\", "\0"}:
        raise bad(where, f"file_name {clean(name, 60)!r} is not the name of a picture in this folder")


# Pairs


def _source(path: Path, line: _Line | None) -> Path | None:
    """Return the picture that belongs to a target."""
    if line is not None and line.source:
        return path.parent / line.source
    if path.parent.name != TARGET:
        return None
    folder = path.parent.parent / SOURCE
    if is_file(folder / path.name):
        return folder / path.name
    return next((one for suffix in SUFFIXES if is_file(one := folder / f"{path.stem}{suffix}")), None)


def _check_pairs(path: Path, found: list[Picture], pairs: bool) -> None:
    """Check that all pictures have a source, or none."""
    if not pairs:
        if any(one.source for one in found):
            raise bad(path, "holds pairs of source and target, and this model edits no picture: give the targets alone")
        return
    for one in found:
        if one.source is None:
            raise bad(
                one.path,
                f"has no source picture, which a model that edits needs: put it into {SOURCE}/ beside {TARGET}/",
            )
        read_upright_size(one.source)


def split(folder: Folder, held_out: int) -> tuple[Folder, Folder]:
    """Return the folder without `held_out` of its pictures, evenly over their order, and those. Raises UsageError if
    too few are left."""
    count = len(folder.pictures)
    if not 0 <= held_out < count:
        raise UsageError(f"--hold-out is {held_out}, and there are {count} pictures; choose 0 to {count - 1}")
    places = {round((i + 0.5) * count / held_out - 0.5) for i in range(held_out)}
    kept = tuple(one for i, one in enumerate(folder.pictures) if i not in places)
    rest = tuple(one for i, one in enumerate(folder.pictures) if i in places)
    return replace(folder, pictures=kept), replace(folder, pictures=rest)


def table(folder: Folder, sizes: Mapping[Path, tuple[int, int]], word: str) -> list[str]:
    """Return lines about a folder before its first step: pictures, sizes, and captions that lack something."""
    pictures, counts = folder.pictures, dict[tuple[int, int], int]()
    for one in pictures:
        counts[sizes[one.path]] = counts.get(sizes[one.path], 0) + one.repeats
    repeated = f", {folder.taken} in a round by their repeats" if folder.taken != len(pictures) else ""
    lines = [f"pictures: {len(pictures)}{repeated}"]
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{width}x{height} ({count})" for (width, height), count in most[:8])
    lines.append(f"sizes: {shown}{f' and {len(most) - 8} more' if len(most) > 8 else ''}")
    small = [one for one in pictures if one.size[0] * one.size[1] < sizes[one.path][0] * sizes[one.path][1]]
    if small:
        lines.append(f"enlarged: {len(small)}, such as {clean(small[0].path.name, 60)} of {_by(small[0].size)}")
    bare = [one for one in pictures if not one.captioned]
    if bare:
        lines.append(f"without a caption of their own: {len(bare)}, which take {clean(bare[0].caption, 60)!r}")
    without = [one for one in pictures if word and word.lower() not in one.caption.lower()]
    if without:
        lines.append(f"captions without {clean(word, 40)!r}: {len(without)}, such as {clean(without[0].path.name, 60)}")
    return [*lines, *folder.notes]


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
