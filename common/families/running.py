"""How a model runs once it is opened, as a call or a command says it: forms are checked before any file is opened."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.base import arguments
from qwenimg.common.base.amounts import parse_max
from qwenimg.common.families import registry
from qwenimg.common.precision import presets
from qwenimg.common.runtime import compiling
from qwenimg.common.weights import quantise


@dataclass(frozen=True, kw_only=True)
class Running:
    """Raises UsageError for a value of a wrong form."""

    backend: str = "auto"
    precision: str = "auto"
    preset: str = "auto"
    compile: str = "auto"
    quantize: str | None = None
    max_memory: str | int | None = None
    fallback: bool = False
    cache_prompts: bool = False

    def __post_init__(self) -> None:
        names = ("backend", "precision", "preset", "compile")
        arguments.check_texts(**{name: getattr(self, name) for name in names}, quantize=self.quantize or "")
        presets.check(self.preset)
        registry.check_precision(self.precision)
        compiling.check(self.compile)
        if self.quantize:
            quantise.parse(self.quantize)
        parse_max(self.max_memory)

    @property
    def limit(self) -> int | None:
        """Bytes of `max_memory`."""
        return parse_max(self.max_memory)
