"""Choices in prompts by a seed, and the files that wildcards name: `name.txt` in a folder, a value on each line.

A prompt of a stranger names files of one kind in folders of the user's choice, and no other: no `..`, no link out of
the folder, regular files only, of bounded size. The time and memory of one prompt are bounded, whatever it and the
files hold.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.latest import drop_oldest
from qwenimg.common.base.safe_files import absolute, bad, is_folder, open_regular
from qwenimg.common.base.text import clean, shown_path
from qwenimg.common.numbers.choices import SeededChoices
from qwenimg.common.prompts.check import MAX_CHARACTERS, check_prompt
from qwenimg.common.prompts.templates import Template, Variants, Wildcard, line_weight, parse

T = TypeVar("T")
OFF = "off"
"""In place of folders: prompts are text, whatever they hold."""
TEMPLATES: Mapping[str, str] = {"prompt": "template", "negative_prompt": "negative_template"}
"""The names under which a request keeps the templates of its texts."""
MAX_FILE = 16 << 20  # bytes
MAX_LINES = 500_000
MAX_CHOICES = 2_000  # of one prompt
MAX_READ = 3 * MAX_CHARACTERS  # characters of one prompt's lines, and options that are weighed
MAX_INSIDE = 80  # choices and lines inside each other
MAX_FILES = 100  # of one prompt
MAX_FILE_LINES = 1_000_000  # of one prompt's files together
KEPT = 16  # files in memory
KEPT_LINES = 1_000_000  # of them together, unless one has more
_NEAR = 2_000  # files that are compared with a name that is not there


@dataclass(frozen=True)
class WeightedList(Generic[T]):
    """The options of a choice, or the lines of a wildcard."""

    lines: Sequence[T]
    weights: Sequence[float] | None  # None: all alike

    @cached_property
    def sums(self) -> list[float]:
        return list(accumulate(self.weights or ()))


class Wildcards:
    """The folders of wildcards, in the order in which they are searched, and the choices in prompts."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        """Set the folders, or OFF alone. Raises UsageError for one that does not exist."""
        self.is_on = OFF not in map(str, folders)
        self.folders = tuple(map(_checked, folders)) if self.is_on else ()
        self._reading = threading.Lock()  # a pipeline checks requests of several threads
        self._templates: dict[str, Template | None] = {}  # of the last texts
        self._values: dict[Path, tuple[tuple[int, int, int], WeightedList[str]]] = {}

    def chosen(self, asked: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return the options of an image with the texts that `seed` chooses in place of templates, and the templates by
        their names in TEMPLATES. Options that have a template there are chosen already. Raises UsageError and
        ModelError."""
        options = dict(asked)
        if not self.is_on or any(name in options for name in TEMPLATES.values()):
            return options
        for name, kept in TEMPLATES.items():
            text = options.get(name)
            if isinstance(text, str) and len(text) <= MAX_CHARACTERS:
                with self._reading:
                    options |= self._chosen(name, kept, text, seed)
        return options

    def _chosen(self, name: str, kept: str, text: str, seed: int) -> dict[str, str]:
        """Return the text that is chosen and its template by their names; nothing for a text without choices."""
        template = self._parsed(text)
        if template is None:
            return {}
        check_prompt(text)
        return {name: _Choosing(self, seed, name).text(template), kept: text}

    def _parsed(self, text: str) -> Template | None:
        """Return `parse` of a text, which many seeds choose from."""
        if text not in self._templates:
            drop_oldest(self._templates, len(TEMPLATES) - 1)
            self._templates[text] = parse(text)
        return self._templates[text]

    def values(self, name: str) -> WeightedList[str]:
        """Return the values of `__name__`. Raises UsageError if there is no such file, and ModelError for one that
        cannot be used."""
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts):
            raise _refused(name, "names of wildcards have no .. and no empty part")
        for folder in self.folders:
            file = folder.joinpath(*parts[:-1], f"{parts[-1]}.txt")
            if os.path.lexists(file):
                return self._read(name, folder, file)
        if not self.folders:
            raise _refused(name, "there is no folder of wildcards, which --wildcards DIR gives")
        raise _refused(name, f"no {clean(parts[-1], 40)}.txt there{_near(self.folders, parts)}")

    def _read(self, name: str, folder: Path, file: Path) -> WeightedList[str]:
        try:
            real = Path(os.path.realpath(file, strict=True))
        except OSError as error:
            raise _unusable(name, f"cannot be read: {error.strerror}") from None
        if not real.is_relative_to(os.path.realpath(folder)):
            raise _unusable(name, "is a link out of the folder of wildcards; put the file itself there")
        try:
            with closing(open_regular(real)) as opened:
                kept = self._values.pop(real, None)
                if kept is None or kept[0] != opened.identity:
                    if opened.size > MAX_FILE:
                        raise ModelError(f"has {opened.size:,} bytes; at most {MAX_FILE:,} are read")
                    kept = opened.identity, _values(opened.read(0, opened.size))
        except ModelError as error:
            raise _unusable(name, str(error).removeprefix(f"{shown_path(real)}: ")) from None
        self._values[real] = kept
        drop_oldest(self._values, KEPT)
        while len(self._values) > 1 and sum(len(one.lines) for _, one in self._values.values()) > KEPT_LINES:
            drop_oldest(self._values, len(self._values) - 1)
        return kept[1]


# Files


def _checked(folder: Path) -> Path:
    path = absolute(Path(os.path.expanduser(folder)))  # noqa: PTH111 (Path.expanduser raises for an unknown user)
    if not is_folder(path):
        raise UsageError(f"--wildcards {shown_path(path)}: no such folder; give the one with the .txt files, or {OFF}")
    return path


def _values(raw: bytes) -> WeightedList[str]:
    """Return the values in the bytes of a file: lines without blank ones and comments. Raises ModelError, whose text
    ends a sentence about the file."""
    if raw.count(b"\n") >= MAX_LINES:
        raise ModelError(f"has {raw.count(10):,} lines; at most {MAX_LINES:,} are read")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"is not UTF-8 (byte {error.start})") from None
    lines = [line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#")]
    lines = [line.removeprefix("\\") if line.startswith("\\#") else line for line in lines]
    if not lines:
        raise ModelError("has no values; write one on each line")
    if "::" not in text:
        return WeightedList(lines, None)
    weights, lines = map(list, zip(*map(line_weight, lines), strict=True))
    if not any(weights):
        raise ModelError("has weights that are all 0")
    return WeightedList(lines, None if all(weights) and len(set(weights)) == 1 else weights)


def _near(folders: Sequence[Path], parts: Sequence[str]) -> str:
    """Return a question with the name that is nearest to one that is not there."""
    import difflib  # here: `qwenimg --help` imports this file

    below = "".join(f"{part}/" for part in parts[:-1])
    names: list[str] = []
    for folder in folders:
        try:
            with os.scandir(folder.joinpath(*parts[:-1])) as entries:
                names += [entry.name[:-4] for entry in islice(entries, _NEAR) if entry.name.endswith(".txt")]
        except OSError:
            continue
    near = difflib.get_close_matches(parts[-1], names, n=1)
    return f", the nearest is __{clean(below + near[0], 60)}__" if near else ""


def _refused(name: str, what: str) -> UsageError:
    return UsageError(f"the wildcard __{clean(name, 60)}__: {what}; to draw it as text write \\__{clean(name, 60)}__")


def _unusable(name: str, what: str) -> ModelError:
    return bad(f"__{clean(name, 60)}__", f"{clean(name, 60)}.txt {what}")


# Choosing


class _Choosing:
    """The choices in one text."""

    def __init__(self, wildcards: Wildcards, seed: int, name: str) -> None:
        self._wildcards, self._choices = wildcards, SeededChoices(seed, name)
        self._made = self._read = self._written = 0
        self._files: dict[str, WeightedList[str]] = {}
        self._inside: list[str] = []  # the wildcards whose line is being read
        self._depth = 0

    def text(self, template: Template) -> str:
        """Return the text that is chosen. Raises UsageError and ModelError."""
        self._depth += 1
        if self._depth > MAX_INSIDE:
            raise UsageError(f"the prompt has choices in choices, deeper than {MAX_INSIDE} with its wildcards")
        parts = [
            part
            if isinstance(part, str)
            else self._line(part.name)
            if isinstance(part, Wildcard)
            else self._group(part)
            for part in template
        ]
        self._depth -= 1
        self._write(sum(len(part) for part in template if isinstance(part, str)))
        return "".join(parts)

    def _values(self, name: str) -> WeightedList[str]:
        """Return the values of a wildcard, which is read once for a text: twenty large files in turn are not read
        again and again."""
        if name not in self._files:
            self._files[name] = self._wildcards.values(name)
            if len(self._files) > MAX_FILES:
                raise UsageError(f"the prompt has more than {MAX_FILES} wildcards, with those of their lines")
            if sum(len(values.lines) for values in self._files.values()) > MAX_FILE_LINES:
                raise UsageError(f"the wildcards of the prompt have more than {MAX_FILE_LINES:,} lines; use fewer")
        return self._files[name]

    def _line(self, name: str) -> str:
        values = self._values(name)
        [line] = self._several(values, 1)
        return self._value(name, line)

    def _value(self, name: str, line: str) -> str:
        """Return the text of a line of a wildcard, which may have choices itself."""
        if name in self._inside:
            raise _unusable(name, "leads back to itself by its lines")
        if len(line) > MAX_CHARACTERS:
            raise _unusable(name, f"has a line of {len(line):,} characters; at most {MAX_CHARACTERS:,} are read")
        self._take(len(line))
        self._inside.append(name)
        template = parse(line)
        text = self.text((line,) if template is None else template)
        self._inside.pop()
        return text

    def _group(self, group: Variants) -> str:
        only = group.options[0] if len(group.options) == 1 else ()
        names = [part for part in only if part != ""]
        if len(names) == 1 and isinstance(names[0], Wildcard):  # {2$$__name__}: of its lines
            name = names[0].name
            values = self._values(name)
            count = self._count(group, len(values.lines))
            lines = self._several(values, count)
            return self._joined(group, [self._value(name, line) for line in lines])
        options = WeightedList(group.options, group.weights)
        count = self._count(group, len(group.options))
        return self._joined(group, [self.text(one) for one in self._several(options, count)])

    def _count(self, group: Variants, available: int) -> int:
        low, high = min(group.low, available), min(group.high, available)
        return low + self._choices.below(high - low + 1)

    def _joined(self, group: Variants, texts: list[str]) -> str:
        self._write(len(group.separator) * max(0, len(texts) - 1))
        return group.separator.join(texts)

    def _several(self, values: WeightedList[T], count: int) -> list[T]:
        """Return `count` different ones of `values`, or fewer if no more have a weight above 0."""
        self._made += count
        if self._made > MAX_CHOICES:
            raise UsageError(f"the prompt has more than {MAX_CHOICES:,} choices")
        if values.weights is None:
            return [values.lines[i] for i in self._choices.several(len(values.lines), count)]
        if not values.sums[-1]:
            raise UsageError("the prompt has a choice whose weights are all 0")
        if count == 1:
            return [values.lines[_place(values.sums, self._choices.share())]]
        rest = [i for i, weight in enumerate(values.weights) if weight]
        chosen: list[T] = []
        while rest and len(chosen) < count:
            self._take(len(rest))
            place = _place(list(accumulate(values.weights[i] for i in rest)), self._choices.share())
            chosen.append(values.lines[rest.pop(place)])
        return chosen

    def _take(self, count: int) -> None:
        self._read += count
        if self._read > MAX_READ:
            raise UsageError(f"the choices of the prompt take more than {MAX_READ:,} characters of lines; use fewer")

    def _write(self, count: int) -> None:
        self._written += count
        if self._written > MAX_CHARACTERS:
            raise UsageError(f"the prompt has more than {MAX_CHARACTERS:,} characters once its choices are made")


def _place(sums: Sequence[float], share: float) -> int:
    """Return the place of an option by the sums of weights up to each."""
    return min(bisect_right(sums, share * sums[-1]), len(sums) - 1)
