"""Distilled models and LoRAs for a few steps, with all settings that belong to them: one option sets them all.

A row is chosen by name and number of steps. Other options of a call, such as another sampler, override it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.request.lora_text import Lora
from qwenimg.common.request.loras import in_cache

_TEXT = re.compile(r"(?P<name>[a-z][a-z-]*)(?::(?P<steps>[0-9]{1,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """A way to generate in few steps: sampler, schedule and guidance as the distilled LoRA or model needs them."""

    steps: tuple[int, ...]  # the numbers of steps that it supports, the usual one first
    sampler: str
    schedule: str = ""  # "": the model's own
    guidance: float = 1.0  # 1: one branch
    # Hub files of the LoRA by number of steps, the best first; 0 is any number. Without files: the model itself.
    loras: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    strength: float = 1.0  # of the LoRA
    others: str = ""  # advice for another number of steps

    def settings(self, steps: int) -> dict[str, Any]:
        """Return the values of a call's options, by their names."""
        values = {"steps": steps, "sampler": self.sampler, "schedule": self.schedule, "guidance": self.guidance}
        files = self.loras.get(steps, self.loras.get(0, ()))
        if not files:
            return values
        file = next((file for file in files if in_cache(file)), files[0])
        return values | {"lora": (Lora(file, self.strength),)}


def parse(text: str) -> tuple[str, int | None]:
    """Return name and number of steps of `NAME[:STEPS]`. Raises UsageError."""
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"--few-steps {clean(text, 40)!r} is not NAME or NAME:STEPS, such as lightning:4")
    return match["name"], int(match["steps"]) if match["steps"] else None


def resolve(asked: Mapping[str, Any], known: Mapping[str, FewSteps]) -> dict[str, Any]:
    """Return the options of a call with `few_steps` replaced by its sampler, schedule, guidance, steps and LoRAs. The
    call's own options take precedence; its LoRAs are added. Raises UsageError."""
    rest = {name: value for name, value in asked.items() if value is not None and name != "few_steps"}
    text = asked.get("few_steps")
    if not text:
        return rest
    name, steps = parse(text)
    if name not in known:
        if not known:
            raise UsageError(f"--few-steps {clean(name, 40)}: nothing is made that draws this model in a few steps")
        raise UsageError(
            f"--few-steps {clean(name, 40)}: is not made for this model, as far as its shapes and its name tell; "
            f"for this one there is {' or '.join(known)}"
        )
    row = known[name]
    if steps is not None and steps not in row.steps:
        made_for = ", ".join(map(str, sorted(row.steps))) + (" step" if row.steps == (1,) else " steps")
        raise UsageError(f"--few-steps {name}:{steps}: is made for {made_for}{row.others and '; ' + row.others}")
    settings = row.settings(steps or row.steps[0])
    return settings | rest | {"lora": (*settings.get("lora", ()), *rest.get("lora", ()))}
