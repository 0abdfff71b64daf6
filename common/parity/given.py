"""What a recorded model was opened with beside its own files, and whether a check is given the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.families.choices import PARTS, components_of
from qwenimg.common.parity.passport import Model
from qwenimg.common.request.loras import Loras, in_cache

_OPTIONS = {"quantize": "-q", "prediction": "--prediction", "lora": "--lora"}
_FILES = (*PARTS, "lora")


def completed(recorded: Model, given: Mapping[str, Any], find: Callable[[str], Path | None]) -> dict[str, Any]:
    """`given`, by the names of options, with what was recorded: bits, prediction, and the files that `find` and the
    cache have by their names. Raises UsageError where it is more, less or another value than was recorded; which files
    they are is seen when they are open."""
    found = dict(given)
    for part, name in recorded.parts.items():
        found[part] = found.get(part) or find(name)
    for option in ("quantize", "prediction"):
        found[option] = found[option] or getattr(recorded, option) or None
    if not found["lora"] and in_cache(recorded.lora):
        found["lora"] = recorded.lora
    _check_options(recorded, found)
    return found


def _check_options(recorded: Model, given: Mapping[str, Any]) -> None:
    said = {**recorded.parts, "quantize": recorded.quantize, "prediction": recorded.prediction, "lora": recorded.lora}
    for name in (*PARTS, *_OPTIONS):
        then, now = said.get(name, ""), given[name] or ""
        option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
        if then and not now:
            raise UsageError(f"the passport was recorded with {option} {clean(then, 80)}; give the same")
        if now and not then:
            raise UsageError(f"the passport was recorded without {option}; leave it out")
        if name not in _FILES and then != now:
            raise UsageError(f"the passport was recorded with {option} {clean(then, 40)}, not {clean(now, 40)}")


def check_files(recorded: Model, others: Collection[str], loras: Loras, lora: str) -> None:
    """Raises ModelError for parts that are of `others`, the components whose files are not the recorded ones, and for
    LoRAs of other files or strengths."""
    for part, name in recorded.parts.items():
        if not components_of([part]).isdisjoint(others):
            option = f"--{part.replace('_', '-')}"
            raise ModelError(f"{option}: these weights are not those of {clean(name, 60)}, which were recorded")
    here: Any = loras.recorded(lora)
    shown, prints = here.get("lora", ""), here.get("lora_fingerprints", [])
    if prints != recorded.lora_fingerprints or _strengths(shown) != _strengths(recorded.lora):
        raise ModelError(
            f"--lora {clean(shown, 80)}: another file or strength than was recorded, {clean(recorded.lora, 80)}"
        )


def _strengths(text: str) -> list[str]:
    """Of the LoRAs in `text`, as a recipe writes them."""
    return [one.rpartition(":")[2] for one in text.split("; ")]
