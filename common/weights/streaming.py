"""Which blocks of a network stay in memory and which are read anew in every pass, for a plan that has to fit.

A block is a module that is called once in a pass: a transformer block, a residual block of a UNet. Two blocks more than
those that stay are there at once: one computes, the next one is being read. What is streamed is spread evenly, so that
each block is read while as many others as possible compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from qwenimg.common.base.found_once import found_once
from qwenimg.common.codes.affine import Affine
from qwenimg.common.codes.block_float import BlockFloat
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.precision.residency import ALWAYS, STREAMED
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed

Blocks = dict[str, list[Entry]]
"""Entries by the path of their block."""

Moved = frozenset[str] | None
"""The dtypes in which a backend keeps the values of convolutions in another order than files have them. None: a card,
which gets every block from the host's memory as it is kept."""

SMALL = 16  # a block is not streamed where the largest one is so many times its size: it would spare next to nothing


def blocks(plan: LoadPlan, streamable: re.Pattern[str] | None) -> Blocks:
    """The entries of each block that are there as long as it computes. `streamable`: `Network.streamable`."""
    found: Blocks = {}
    for name, entry in plan.entries.items():
        match = streamable.match(name) if streamable else None
        if match and entry.residency in (ALWAYS, STREAMED):
            found.setdefault(match[1], []).append(entry)
    return found


def streamed_blocks(plan: LoadPlan) -> Blocks:
    """The entries that are streamed."""
    found: Blocks = {}
    for entry in plan.entries.values():
        if entry.residency is STREAMED:
            found.setdefault(entry.block, []).append(entry)
    return found


def branches(plan: LoadPlan) -> dict[str, LoadPlan]:
    """Of the streamed blocks that have something beside their weights, those weights."""
    found = {path: {e.name for e in block if e.is_beside} for path, block in streamed_blocks(plan).items()}
    return {path: plan.only(names.__contains__) for path, names in found.items() if names}


@found_once
def held(plan: LoadPlan, moved: Moved) -> int:
    """Bytes of weights in memory at once: what always is, and of the streamed blocks one in use and one being read."""
    always = sum(entry.nbytes for entry in plan.entries.values() if entry.residency is ALWAYS)
    return always + passing(plan, moved)


@found_once
def passing(plan: LoadPlan, moved: Moved) -> int:
    """Bytes of the streamed blocks that are in memory at once, from the first call on."""
    return _two([_Size.of(block, moved) for block in streamed_blocks(plan).values()])


@found_once
def read(plan: LoadPlan) -> int:
    """Bytes that are read anew in every pass."""
    return sum(max(_kept(block), _in_files(block)) for block in streamed_blocks(plan).values())


def straight(entry: Entry, moved: Moved) -> bool:
    """Return whether `entry` is read into the memory that computes: a file has what is kept of it, or the same in
    16 bit where 32 are kept."""
    if entry.fused or (moved is not None and len(entry.shape) == 4 and entry.storage.dtype in moved):
        return False
    if isinstance(entry.storage, Packed):
        own = entry.source.kept
        return isinstance(entry.source.code, Affine | BlockFloat) and own is not None and own.code == entry.storage.code
    return entry.source.is_plain and entry.storage.dtype in (entry.source.dtype, "float32")


def fitting(plan: LoadPlan, streamable: re.Pattern[str] | None, budget: int, moved: Moved) -> LoadPlan:
    """`plan` with as few of its blocks streamed as leave at most `budget` bytes in memory; where none do, with those
    that leave the fewest."""
    whole = held(plan, moved)
    choices = [] if whole <= budget else _choices(plan, streamable, moved)
    if not choices:
        return plan
    count, left = next((choice for choice in choices if choice[1] <= budget), min(choices, key=lambda one: one[1]))
    return _with_streamed(plan, streamable, count) if left < whole else plan


@found_once
def _choices(plan: LoadPlan, streamable: re.Pattern[str] | None, moved: Moved) -> list[tuple[int, int]]:
    """How many blocks may be streamed, from the fewest on, and the bytes in memory that each leaves."""
    whole, found = held(plan, moved), _streamable(blocks(plan, streamable))
    sizes = {path: _Size.of(found[path], moved) for path in sorted(found, key=_natural)}
    choices = []
    for count in range(3, len(sizes) + 1):  # two are in memory anyhow
        chosen = [sizes[path] for path in _spread(list(sizes), count)]
        choices.append((count, whole + _two(chosen) - sum(size.kept for size in chosen)))
    return choices


@found_once
def _with_streamed(plan: LoadPlan, streamable: re.Pattern[str] | None, count: int) -> LoadPlan:
    """`plan` with so many of its blocks streamed."""
    found = _streamable(blocks(plan, streamable))
    return _marked(plan, {path: found[path] for path in _spread(sorted(found, key=_natural), count)})


def as_in(plan: LoadPlan, other: LoadPlan) -> LoadPlan:
    """`plan` with those entries streamed that `other`, of the same parameters, streams."""
    found = streamed_blocks(other)
    return _marked(plan, {path: [plan.entries[e.name] for e in block] for path, block in found.items()})


@dataclass(frozen=True)
class _Size:
    """Bytes of a block as it is kept, and as it is read ahead where that goes into memory of its own; and whether it
    goes straight into the memory that computes."""

    kept: int
    read: int
    straight: bool

    @staticmethod
    def of(block: list[Entry], moved: Moved) -> _Size:
        kept = _kept(block)
        if moved is None:
            return _Size(kept, kept, straight=True)
        return _Size(kept, sum(map(read_bytes, block)), all(straight(entry, moved) for entry in block))


def read_bytes(entry: Entry) -> int:
    """Return the bytes of `entry` as it is read and not in its place yet."""
    return entry.nbytes if isinstance(entry.storage, Packed) else prod(entry.shape) * BYTES[entry.dtype]


def _kept(block: Iterable[Entry]) -> int:
    """Return the bytes of a block as it is kept."""
    return sum(entry.nbytes for entry in block)


def _in_files(block: Iterable[Entry]) -> int:
    """Return the bytes of a block as files have it."""
    return sum(piece.end - piece.begin for entry in block for piece in entry.source.pieces)


def _two(sizes: list[_Size]) -> int:
    """Return the bytes of the largest block in use beside the largest that is read ahead: into a second piece of memory
    as large as the first, where all go straight."""
    in_use = max((size.kept for size in sizes), default=0)
    if all(size.straight for size in sizes):
        return 2 * in_use
    return in_use + max(size.read for size in sizes)


def _streamable(found: Blocks) -> Blocks:
    """The blocks that are worth it, and whose weights can be read again as they are kept."""
    largest = max(map(_kept, found.values()), default=0)
    return {
        path: block
        for path, block in found.items()
        if _kept(block) * SMALL > largest and all(_readable(entry) for entry in block)
    }


def _readable(entry: Entry) -> bool:
    """Whether reading costs no more than reading: codes that are to be made are made once, for good."""
    if not isinstance(entry.storage, Packed):
        return True
    kept = entry.source.kept
    return kept is not None and kept.code == entry.storage.code and not entry.fused


def _natural(path: str) -> tuple[tuple[str, int], ...]:
    """An order in which 10 comes after 9; that of a pass, but for what a UNet has between its residual blocks."""
    return tuple((name, int(digits or 0)) for name, digits in re.findall(r"([^\d.]+)\.?(\d*)", path))


def _spread(paths: list[str], count: int) -> list[str]:
    """`count` of `paths`, evenly."""
    total = len(paths)
    return [path for i, path in enumerate(paths) if (i + 1) * count // total > i * count // total]


def _marked(plan: LoadPlan, streamed: Mapping[str, Iterable[Entry]]) -> LoadPlan:
    changed = {
        entry.name: replace(entry, residency=STREAMED, block=path)
        for path, block in streamed.items()
        for entry in block
    }
    return replace(plan, entries={name: changed.get(name, entry) for name, entry in plan.entries.items()})
