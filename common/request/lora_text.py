"""A LoRA of a request, and the text of `--lora`: `FILE[:SCALE]`, several separated by semicolons."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwenimg.common.base.arguments import home, path_text
from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request.option import as_number

if TYPE_CHECKING:
    from qwenimg.common.weights.plan import Mode

NONE = "none"  # no LoRA, also if a configuration has some
MOST = 32
_MODES: dict[str, Mode] = {"auto": "auto", "fuse": "fuse", "side": "side"}
LARGE = 10.0  # a larger strength is rarely intended


@dataclass(frozen=True)
class Lora:
    """One LoRA with its strength, checked on construction. Raises UsageError."""

    source: str  # a file, a folder or a hub id
    scale: float = 1.0

    def __post_init__(self) -> None:
        if ";" in self.source:
            raise UsageError(f"lora {clean(self.source, 80)}: a semicolon parts LoRAs; give the file a name without it")
        if not math.isfinite(self.scale) or abs(self.scale) > 1e6:
            raise UsageError(f"--lora {clean(self, 80)}: a strength is a finite number, usually 0 to 1")

    def __str__(self) -> str:
        """Return the text that `parse` reads back as this LoRA."""
        plain = self.scale == 1 and ":" not in self.source
        return self.source if plain else f"{self.source}:{number_text(self.scale)}"

    @property
    def warning(self) -> str | None:
        if abs(self.scale) <= LARGE:
            return None
        return f"--lora {clean(self.source, 60)}: a strength of {self.scale:g} is far beyond what LoRAs are made for"


def parse(value: object, files: bool = True) -> tuple[Lora, ...]:
    """Return the LoRAs of a text, a path, a pair (path, scale), or a list of these, in order. files: a file that is
    there by the whole name, with its colons, is that file; without it none is looked for. Raises UsageError."""
    values = value if isinstance(value, (list, tuple)) and not _is_pair(value) else [value]
    parts = [part for one in values for part in (_texts(one) if isinstance(one, str) else [one])]
    check(parts)  # before a file is looked for
    return tuple(_one(part, files) if isinstance(part, str) else _typed(part) for part in parts)


def check(loras: list[object] | tuple[Lora, ...]) -> None:
    """Raise UsageError for more LoRAs than are added."""
    if len(loras) > MOST:
        raise UsageError(f"--lora: {len(loras)} LoRAs; at most {MOST} are added")


def number_text(value: float) -> str:
    """Return the shortest text of a number that is exact."""
    return short if float(short := f"{value:g}") == value else repr(value)


def mode(text: str) -> Mode:
    """Return how LoRAs are applied: merged into the weights, computed as branches, or auto. Raises UsageError."""
    if text not in _MODES:
        raise UsageError(f"--lora-mode {clean(text, 40)!r} is not one of {', '.join(modes())}")
    return _MODES[text]


def modes() -> list[str]:
    """Return the names of all modes."""
    return list(_MODES)


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip() not in ("", NONE)]


def _one(part: str, files: bool) -> Lora:
    source, colon, end = part.rpartition(":")
    if not colon or (files and os.path.lexists(home(part))):
        return Lora(part)
    try:
        scale = float(end)
    except ValueError:
        raise UsageError(f"--lora {clean(part, 80)}: {clean(end, 30)!r} is no number; write FILE:SCALE") from None
    if not source:
        raise UsageError(f"--lora {clean(part, 80)}: no file before the colon; write FILE:SCALE")
    return Lora(source, scale)


def _is_pair(value: list[object] | tuple[object, ...]) -> bool:
    """Return whether `value` is one LoRA and its strength."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return path_text(value[1]) is None and not isinstance(value[1], (list, tuple, Lora))


def _typed(value: object) -> Lora:
    """Return the LoRA of a path, or of a pair (path, scale)."""
    if isinstance(value, Lora):
        return value
    file, scale = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    path = path_text(file)
    if path is None:
        kind = clean(type(value).__name__, 40)
        raise UsageError(f"lora has {kind}; expected FILE, FILE:SCALE, a path, or a pair (path, strength)")
    return Lora(path, as_number(f"the strength of lora {clean(path, 80)}", scale))
