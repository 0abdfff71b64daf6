"""The text of `--control`: `MODEL=PICTURE[:SCALE[:START-END]]`, several separated by semicolons."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

MOST = 8
MAX_SCALE = 10.0
PREPROCESSORS = ("canny",)
_FORM = "write MODEL=PICTURE, MODEL=PICTURE:SCALE or MODEL=PICTURE:SCALE:START-END"
_NUMBER = r"[0-9.]+(?:[eE][+-]?[0-9]+)?"
_WINDOW = re.compile(rf"(?P<start>{_NUMBER})-(?P<end>{_NUMBER})", re.ASCII)
_PREPROCESSED = re.compile(r"(?P<name>[a-z_-]{1,20})@(?P<picture>.+)", re.ASCII | re.DOTALL)


class NamedControl(NamedTuple):
    """One control: a network by the user's name for it, and the file of its picture."""

    model: str
    picture: str
    preprocessor: str = ""  # one of PREPROCESSORS that makes the control picture, or "" for a picture as it is
    scale: float = 1.0
    start: float = 0.0  # the share of the steps before the first that it controls
    end: float = 1.0  # the share of the steps at its last one

    def __str__(self) -> str:
        """Return the text of which `parse` makes this control, whatever files there are."""
        before = f"{self.preprocessor}@" * bool(self.preprocessor)
        if not before and _PREPROCESSED.fullmatch(self.picture):
            before = "./"
        return f"{self.model}={before}{self.picture}:{self.scale!r}:{self.start!r}-{self.end!r}"

    @property
    def numbers(self) -> str:
        """The scale and the shares of the steps, in the form of a control's text."""
        steps = "" if (self.start, self.end) == (0, 1) else f":{self.start:g}-{self.end:g}"
        return f":{self.scale:g}{steps}"

    def steps(self, count: int) -> tuple[int, int]:
        """Return the number of steps before the first of `count` that it controls, and up to its last one: a step does
        not count if a part of it lies outside."""
        before = sum(step / count < self.start for step in range(count))
        return before, max(before, sum((step + 1) / count <= self.end for step in range(count)))


def parse(text: str) -> tuple[NamedControl, ...]:
    """Return the controls of `text`, in its order. No file is looked for. Raises UsageError."""
    return _parsed(text, lambda picture: False)


def parse_files(text: str) -> tuple[NamedControl, ...]:
    """Return the controls of a `text` whose pictures are files: one that is there by the whole name, with its colons,
    is that file. Raises UsageError."""
    return _parsed(text, lambda picture: os.path.lexists(home(picture)))


def _parsed(text: str, is_file: Callable[[str], bool]) -> tuple[NamedControl, ...]:
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if len(parts) > MOST:  # before a file is looked for
        raise UsageError(f"--control: {len(parts)} controls; at most {MOST} are taken")
    return tuple(_one(part, is_file) for part in parts)


def _one(text: str, is_file: Callable[[str], bool]) -> NamedControl:
    model, equals, rest = (part.strip() for part in text.partition("="))
    if not (equals and model and rest):
        raise UsageError(f"--control {clean(text, 80)}: {_FORM}")
    preprocessor, picture = _preprocessor(text, rest, is_file)
    scale, window = "1", "0-1"
    if not is_file(picture):
        picture, scale, window = _numbers(text, picture)
    return NamedControl(model, picture, preprocessor, _scale(text, scale), *_steps(text, window))


def _preprocessor(text: str, rest: str, is_file: Callable[[str], bool]) -> tuple[str, str]:
    """Return the preprocessor before the `@` of a picture, if there is one, and the rest."""
    match = _PREPROCESSED.fullmatch(rest)
    if match is None or is_file(rest):
        return "", rest
    if match["name"] not in PREPROCESSORS:
        raise UsageError(
            f"--control {clean(text, 80)}: {clean(match['name'], 20)} is no preprocessor here; there is "
            f"{' and '.join(PREPROCESSORS)}. Make the picture by another program and give it as it is"
        )
    return match["name"], match["picture"]


def _numbers(text: str, rest: str) -> tuple[str, str, str]:
    """Return the picture, the scale and the share of the steps that `rest` says, each as a text."""
    head, colon, last = rest.rpartition(":")
    if not colon:
        return rest, "1", "0-1"
    if not _WINDOW.fullmatch(last) and not ("-" in last and _float(head.rpartition(":")[2]) is not None):
        return _given(text, head), last, "0-1"
    picture, colon, scale = head.rpartition(":")
    if not colon:
        raise UsageError(f"--control {clean(text, 80)}: the steps {clean(last, 20)} need a scale before them; {_FORM}")
    return _given(text, picture), scale, last


def _given(text: str, picture: str) -> str:
    if not picture:
        raise UsageError(f"--control {clean(text, 80)}: no picture before the colon; {_FORM}")
    return picture


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _scale(text: str, scale: str) -> float:
    number = _float(scale)
    if number is None:
        raise UsageError(f"--control {clean(text, 80)}: {clean(scale, 30)!r} is no scale; {_FORM}")
    if not (math.isfinite(number) and 0 <= number <= MAX_SCALE):
        raise UsageError(f"--control {clean(text, 80)}: a scale is a number from 0 to {MAX_SCALE:g}, usually 0.5 to 1")
    return number


def _steps(text: str, window: str) -> tuple[float, float]:
    match = _WINDOW.fullmatch(window)
    start, end = (None, None) if match is None else (_float(match["start"]), _float(match["end"]))
    if start is None or end is None or not (0 <= start <= 1 and 0 <= end <= 1):
        raise UsageError(
            f"--control {clean(text, 80)}: {clean(window, 30)!r} are no shares of the steps; write START-END from 0 to "
            "1, as 0-0.8"
        )
    if start > end:
        raise UsageError(f"--control {clean(text, 80)}: starts at {start:g}, behind its end at {end:g}")
    return start, end
