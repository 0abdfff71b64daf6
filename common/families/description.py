"""What is said of a model's files, and the words that all families say it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.text import clean
from qwenimg.common.weights.safetensors import Stored

SHOWN = 5  # names of a kind


@dataclass(frozen=True, kw_only=True)
class Description:
    """Lines to print, and the faults: what does not fit together."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def summary(name: str, tensors: Mapping[str, Stored]) -> str:
    dtypes = Counter(stored.dtype for stored in tensors.values())
    parameters = sum(prod(stored.shape) for stored in tensors.values())
    size = sum(stored.end - stored.begin for stored in tensors.values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    count = counted(len(tensors), "tensor")
    return f"{name}: {count} ({kinds}), {parameters / 1e6:,.1f} M parameters, {size_text(size)}"


def listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(clean(name, 80) for name in every[:SHOWN]) + more
