"""A control of a request, and the text of `--control`: `MODEL=PICTURE[:SCALE[:START-END]]`, several separated by
semicolons. For a model that sees the picture itself it is `PICTURE`."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request.lora_text import number_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 8
MAX_SCALE = 10.0
PREPROCESSORS = ("canny", "scribble", "invert", "grey", "blur", "colour")  # `pictures/preprocessors.py`
ROLES = ("also", "mask")
"""What a picture is to the last one of an IP-Adapter: a further picture, or the part of the image where that counts."""
KINDS = ("openpose", "depth", "softedge", "lineart", "normal", "segment", "tile", "inpaint", "low-quality")
"""The kinds of pictures that were made elsewhere, for networks of several kinds."""
# The kinds of the pictures that preprocessors make
_MADE = {"canny": "lineart", "scribble": "softedge", "invert": "lineart", "blur": "tile"}
_FORM = "write MODEL=PICTURE, MODEL=PICTURE:SCALE or MODEL=PICTURE:SCALE:START-END"
_NUMBER = r"[0-9.]+(?:[eE][+-]?[0-9]+)?"
_BLOCK = r"(?:down|up)_blocks\.[0-9]{1,2}(?:\.attentions\.[0-9]{1,2})?|mid_block"
_NAME = rf"(?:style|layout|composition|{_BLOCK}|tokens|pooled)"
_PART = rf"{_NAME}(?:={_NUMBER})?"
_PARTS = re.compile(rf"{_PART}(?:,{_PART}){{0,15}}", re.ASCII)
_WINDOW = re.compile(rf"(?P<start>{_NUMBER})-(?P<end>{_NUMBER})", re.ASCII)
_PREPROCESSED = re.compile(r"(?P<name>[a-z_-]{1,20})@(?P<picture>.+)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Control:
    """One control, checked on construction: a network, its picture and its numbers. Raises UsageError."""

    network: str  # by the user's name for it; "": the model itself sees the picture
    file: str  # of its picture, or another name for the picture
    # One of PREPROCESSORS that makes the control picture, of ROLES or of KINDS, or "": as it is
    preprocessor: str = ""
    scale: float = 1.0
    start: float = 0.0  # the share of the steps before the first that it controls
    end: float = 1.0  # the share of the steps at its last one
    parts: tuple[tuple[str, float], ...] = ()  # the scale in some parts of the model; it has none in the others
    picture: NDArray[np.uint8] | None = field(default=None, compare=False, repr=False)  # [H, W, 3], once it is read
    whole: bool = field(default=False, compare=False, repr=False)  # True: its network sees it apart from the image

    def __post_init__(self) -> None:
        if ";" in f"{self.network}{self.file}" or "=" in self.network:
            raise UsageError(
                f"control {clean(self.network, 80)}: a semicolon parts controls, and = a model from its picture"
            )
        told = f"--control {clean(self, 80)}"
        if not (math.isfinite(self.scale) and 0 <= self.scale <= MAX_SCALE):
            raise UsageError(f"{told}: a scale is a number from 0 to {MAX_SCALE:g}, usually 0.5 to 1")
        if not all(math.isfinite(scale) and 0 <= scale <= MAX_SCALE for _, scale in self.parts):
            raise UsageError(f"{told}: the scale of a part is a number from 0 to {MAX_SCALE:g}")
        if not (0 <= self.start <= 1 and 0 <= self.end <= 1):
            raise UsageError(f"{told}: {_no_shares(f'{self.start:g}-{self.end:g}')}")
        if self.start > self.end:
            raise UsageError(f"{told}: starts at {self.start:g}, behind its end at {self.end:g}")

    def __str__(self) -> str:
        """Return the text that `parse` reads back as this control, without the picture's pixels."""
        window = (self.start, self.end) != (0, 1)
        scale = f":{self.scale_text}" if window or self.scale_text != "1" or ":" in self.file else ""
        steps = f":{number_text(self.start)}-{number_text(self.end)}" * window
        rest = f"{self.file}{scale}{steps}"
        if self.preprocessor:
            rest = f"{self.preprocessor}@{rest}"
        elif _PREPROCESSED.fullmatch(rest):
            rest = f"./{rest}"
        if not self.network:
            return f"={rest}" if "=" in rest else rest
        return f"{self.network}={rest}" if self.file else f"{self.network}{rest}"

    @property
    def scale_text(self) -> str:
        """The scale, or those of its parts, as in the text of the control."""
        named = ",".join(f"{name}={number_text(scale)}" for name, scale in self.parts)
        return named or number_text(self.scale)

    @property
    def kind(self) -> str:
        """The kind of its picture, one of KINDS; "" if it is open."""
        return self.preprocessor if self.preprocessor in KINDS else _MADE.get(self.preprocessor, "")

    def kind_among(self, kinds: Collection[str]) -> str:
        """Return the kind of its picture for a network of these `kinds`, of which some may be what a preprocessor
        makes; "" if it is open."""
        return self.preprocessor if self.preprocessor in kinds else self.kind

    @property
    def numbers(self) -> str:
        """The scale and the shares of the steps as recipes have them."""
        steps = "" if (self.start, self.end) == (0, 1) else f":{self.start:g}-{self.end:g}"
        return f":{self.scale_text if self.parts else format(self.scale, 'g')}{steps}"

    def steps(self, count: int) -> tuple[int, int]:
        """Return the number of steps before the first of `count` that it controls, and up to its last one: a step does
        not count if a part of it lies outside."""
        before = sum(step / count < self.start for step in range(count))
        return before, max(before, sum((step + 1) / count <= self.end for step in range(count)))


def parse(value: object, files: bool = True) -> tuple[Control, ...]:
    """Return the controls of a text, or of a list of texts, in order. files: a picture that is there by its whole name,
    with its colons, is that file; without it none is looked for. Raises UsageError."""
    values = value if isinstance(value, (list, tuple)) else [value]
    parts = [part for one in values for part in (_texts(one) if isinstance(one, str) else [one])]
    check(parts)  # before a file is looked for
    return tuple(part if isinstance(part, Control) else _one(part, _is_file(files)) for part in parts)


def check(controls: list[object] | tuple[Control, ...]) -> None:
    """Raise UsageError for more controls than are taken."""
    if len(controls) > MOST:
        raise UsageError(f"--control: {len(controls)} controls; at most {MOST} are taken")


def options_text(controls: Iterable[Control]) -> str:
    """Return the options of the command line that give `controls`, for a message; a shell reads each as one word."""
    return " ".join(f"--control {shlex.quote(clean(one, 120))}" for one in controls)


def named(
    network: str, file: str, scale: float, start: float, end: float, parts: tuple[tuple[str, float], ...] = ()
) -> Control:
    """Return the control for `network`, or for the model itself if that is empty, with the picture `file`, optionally
    prefixed by a preprocessor (canny@). Raises UsageError."""
    preprocessor, file = _preprocessor(f"{network}={file}", file, _is_file(True))
    return Control(network, file, preprocessor, scale, start, end, parts)


def _is_file(files: bool) -> Callable[[str], bool]:
    return (lambda name: os.path.lexists(home(name))) if files else _none


def _none(name: str) -> bool:
    return False


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def _one(text: object, is_file: Callable[[str], bool]) -> Control:
    if not isinstance(text, str):
        raise UsageError(f"control has {clean(type(text).__name__, 40)}; expected a text, MODEL=PICTURE")
    network, equals, rest = (part.strip() for part in text.partition("="))
    if not equals:
        network, rest = "", text
    if not rest:
        raise UsageError(f"--control {clean(text, 80)}: {_FORM}")
    preprocessor, picture = _preprocessor(text, rest, is_file)
    if is_file(picture):
        return Control(network, picture, preprocessor)
    whole, (picture, scale, window) = picture, _numbers(text, picture)
    if not network and is_file is not _none and not is_file(picture):
        raise UsageError(
            f"--control {clean(text, 80)}: no such picture {clean(whole, 60)}; {_FORM}, or PICTURE alone for a model "
            "that sees it itself"
        )
    number, parts = _scale(text, scale)
    return Control(network, picture, preprocessor, number, *_shares(text, window), parts)


def numbers(
    text: str, option: str, form: str, *, files: bool
) -> tuple[str, float, tuple[float, float], tuple[tuple[str, float], ...]]:
    """Return what stands before the numbers in the `text` of another option, the scale, the shares of the steps, and
    the scales of parts. form: how to write it, for messages. Raises UsageError."""
    if ":" not in text or _is_file(files)(text):
        return text, 1.0, (0.0, 1.0), ()
    try:
        head, scale, window = _numbers(text, text)
        number, parts = _scale(text, scale)
        return head, number, _shares(text, window), parts
    except UsageError as error:
        raise UsageError(str(error).replace("--control", f"--{option}").replace(_FORM, form)) from None


def _scale(text: str, scale: str) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return the scale and those of parts that the text `scale` gives."""
    number = _float(scale)
    if number is not None:
        return number, ()
    if not _PARTS.fullmatch(scale):
        raise UsageError(f"--control {clean(text, 80)}: {clean(scale, 30)!r} is no scale; {_FORM}")
    named = [part.partition("=") for part in scale.split(",")]
    scales = {name: _float(value or "1") for name, _, value in named}
    if len(scales) < len(named) or None in scales.values():
        raise UsageError(f"--control {clean(text, 80)}: {clean(scale, 30)!r} names a part twice, or has no number")
    return 1.0, tuple((name, scale) for name, scale in scales.items() if scale is not None)


def _preprocessor(text: str, rest: str, is_file: Callable[[str], bool]) -> tuple[str, str]:
    """Return the preprocessor or kind before the `@` of a picture, if there is one, and the rest."""
    match = _PREPROCESSED.fullmatch(rest)
    if match is None or is_file(rest):
        return "", rest
    if match["name"] not in (*PREPROCESSORS, *ROLES, *KINDS):
        raise UsageError(
            f"--control {clean(text, 80)}: {clean(match['name'], 20)} is no preprocessor here; there are "
            f"{', '.join(PREPROCESSORS)}. Make the picture by another program and give it as it is"
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


def _shares(text: str, window: str) -> tuple[float, float]:
    """Return the first and the last share of the steps, which `Control` checks."""
    match = _WINDOW.fullmatch(window)
    start, end = (None, None) if match is None else (_float(match["start"]), _float(match["end"]))
    if start is None or end is None:
        raise UsageError(f"--control {clean(text, 80)}: {_no_shares(window)}")
    return start, end


def _no_shares(window: str) -> str:
    return f"{clean(window, 30)!r} are no shares of the steps; write START-END from 0 to 1, as 0-0.8"
