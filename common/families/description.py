"""The description of a model's files, and the phrases in it that all families share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.base.shape import Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.quant.gguf_blocks import storage_of
from qwenimg.common.quant.rotated import Rotated
from qwenimg.common.weights.plan import LoadPlan, Source

TYPE = "type: "  # begins the line with the type of model that a file is of
SHOWN = 5  # names of a list that are shown
_REASON = re.compile(r" \(|: |; ")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Lines to print, and the faults: values that do not fit together."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def type(self) -> str:
        """The type of model that a file is of, without its reason; "" if no line has it."""
        line = next((line for line in self.lines if line.startswith(TYPE)), "")
        return without_reason(line.removeprefix(TYPE))


def without_reason(text: str) -> str:
    """Return the start of a description of a model, before any reason or detail."""
    return _REASON.split(text, maxsplit=1)[0]


def of_file(layout: str, header: Header, looked_up: Callable[[str], bool] = lambda name: False) -> Description:
    """Return the description of a file in this `layout`: its weights, and for GGUF their size in memory. looked_up: as
    for `in_memory`."""
    description = Description(lines=[f"layout: {layout}", summary("file", header.tensors)])
    if header.format == "GGUF":
        description.lines.append(in_memory(header.tensors, looked_up))
    return description


def component_line(name: str, plan: LoadPlan) -> str:
    """Return the summary of a component in the file of a model."""
    return f"{name}: {counted(len(plan.entries), 'tensor')}, {plan.parameters / 1e6:,.1f} M parameters"


def summary(name: str, tensors: Mapping[str, Stored]) -> str:
    every = tensors.values()
    size = sum(stored.end - stored.begin for stored in every)
    return _summary(name, [stored.dtype for stored in every], [stored.shape for stored in every], size)


def weights_summary(name: str, weights: Iterable[Source]) -> str:
    """Return the summary of weights, each of which may be several tensors: codes and their scales."""
    every = list(weights)
    size = sum(piece.end - piece.begin for source in every for piece in source.pieces)
    return _summary(name, [_kind(source) for source in every], [source.shape for source in every], size)


def kinds(weights: Iterable[Source]) -> str:
    """Return how many weights are in each dtype or code."""
    return _counts([_kind(source) for source in weights])


def _counts(kinds: list[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(kinds).items()))


def _summary(name: str, kinds: list[str], shapes: list[Shape], size: int) -> str:
    parameters = sum(map(prod, shapes))
    tensors = f"{counted(len(kinds), 'tensor')} ({_counts(kinds)})"
    return f"{name}: {tensors}, {parameters / 1e6:,.1f} M parameters, {size_text(size)}"


def _kind(source: Source) -> str:
    if isinstance(source.code, Affine):
        turned = f", rotated by groups of {source.code.rotation}" if source.code.rotation else ""
        return f"in {source.code.bits} bits by groups of {source.code.group}{turned}"
    if isinstance(source.code, BlockFloat):
        return f"in {source.code.mode}"
    if isinstance(source.code, Rotated):
        return f"in {source.code.bits} bits, rotated by groups of {source.code.rotation}"
    return f"{source.first.dtype}{' with scales' if len(source.pieces) > 1 else ''}"


def in_memory(tensors: Mapping[str, Stored], looked_up: Callable[[str], bool]) -> str:
    """Return a GGUF file's size in memory: codes stay codes if they can and the tensor is no table, which is
    `looked_up` and not multiplied; all else is 16 bit."""
    codes = dense = 0
    for name, stored in tensors.items():
        storage = storage_of(stored.dtype)
        if storage and storage.code.fits(stored.shape) and not looked_up(name):
            codes += storage.code.nbytes(stored.shape, storage.scale)
        else:
            dense += 2 * prod(stored.shape)
    return f"in memory: {size_text(codes)} as codes, {size_text(dense)} decoded to 16 bit"


def listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(clean(name, 80) for name in every[:SHOWN]) + more
