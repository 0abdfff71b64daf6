"""The text of `--lora`: `FILE[:SCALE]`, several separated by semicolons."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.weights.plan import Mode

NONE = "none"  # no LoRA, also if a configuration has some
MOST = 32
_MODES: dict[str, Mode] = {"auto": "auto", "fuse": "fuse", "side": "side"}
LARGE = 10.0  # a larger strength is rarely intended


class NamedLora(NamedTuple):
    """One LoRA: a file, a folder or a hub id, with its strength."""

    name: str
    strength: float = 1.0

    @property
    def warning(self) -> str | None:
        if abs(self.strength) <= LARGE:
            return None
        return f"--lora {clean(self.name, 60)}: a strength of {self.strength:g} is far beyond what LoRAs are made for"


def parse(text: str) -> tuple[NamedLora, ...]:
    """Return the LoRAs of `text`, in its order. Raises UsageError."""
    parts = [part.strip() for part in text.split(";") if part.strip() not in ("", NONE)]
    if len(parts) > MOST:  # before a file is looked for
        raise UsageError(f"--lora: {len(parts)} LoRAs; at most {MOST} are added")
    return tuple(map(_one, parts))


def mode(text: str) -> Mode:
    """Return how LoRAs are applied: merged into the weights, computed beside them, or auto. Raises UsageError."""
    if text not in _MODES:
        raise UsageError(f"--lora-mode {clean(text, 40)!r} is not one of {', '.join(modes())}")
    return _MODES[text]


def modes() -> list[str]:
    """Return the names of all modes."""
    return list(_MODES)


def _one(part: str) -> NamedLora:
    name, colon, end = part.rpartition(":")
    if not colon or os.path.lexists(part):
        return NamedLora(part)
    try:
        strength = float(end)
    except ValueError:
        raise UsageError(f"--lora {clean(part, 80)}: {clean(end, 30)!r} is no number; write FILE:SCALE") from None
    if not name:
        raise UsageError(f"--lora {clean(part, 80)}: no file before the colon; write FILE:SCALE")
    if not math.isfinite(strength) or abs(strength) > 1e6:
        raise UsageError(f"--lora {clean(part, 80)}: a strength is a finite number, usually 0 to 1")
    return NamedLora(name, strength)
