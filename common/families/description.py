"""What is said of a model's files, and the words that all families say it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.text import clean
from qwenimg.common.weights.gguf_blocks import kept_as
from qwenimg.common.weights.stored import Stored

SHOWN = 5  # names of a kind


@dataclass(frozen=True, kw_only=True)
class Description:
    """Lines to print, and the faults: what does not fit together."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def summary(name: str, tensors: Mapping[str, Stored], parameters: int | None = None) -> str:
    """`parameters`: how many values they mean, where some are codes."""
    dtypes = Counter(stored.dtype for stored in tensors.values())
    if parameters is None:
        parameters = sum(prod(stored.shape) for stored in tensors.values())
    size = sum(stored.end - stored.begin for stored in tensors.values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    count = counted(len(tensors), "tensor")
    return f"{name}: {count} ({kinds}), {parameters / 1e6:,.1f} M parameters, {size_text(size)}"


def in_memory(tensors: Mapping[str, Stored], looked_up: Callable[[str], bool]) -> str:
    """Of a GGUF file what is resident: codes where they can stay codes and the tensor is no table, which is looked up
    and not multiplied; else 16 bit."""
    codes = dense = 0
    for name, stored in tensors.items():
        kept = kept_as(stored.dtype)
        if kept and kept.code.fits(stored.shape) and not looked_up(name):
            codes += kept.code.nbytes(stored.shape, kept.scale)
        else:
            dense += 2 * prod(stored.shape)
    return f"in memory: {size_text(codes)} as codes, {size_text(dense)} decoded to 16 bit"


def listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(clean(name, 80) for name in every[:SHOWN]) + more
