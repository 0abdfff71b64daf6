"""The choice of blocks that are streamed, for a plan that must fit: the other blocks of a network stay in memory.

A block is a module that is called once in a pass: a transformer block, a residual block of a UNet. Two streamed blocks
are in memory at once: one computes, the next one is being read. Streamed blocks are spread evenly, so that each is read
while as many others as possible compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from qwenimg.common.base.found_once import found_once
from qwenimg.common.precision.precision import BYTES
from qwenimg.common.precision.residency import ALWAYS, STREAMED
from qwenimg.common.quant.affine import Affine
from qwenimg.common.quant.block_float import BlockFloat
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed

Blocks = dict[str, list[Entry]]
"""Entries by the path of their block."""

Moved = frozenset[str] | None
"""The dtypes in which a backend keeps the values of convolutions in another order than files. None: a card, which gets
every block from the host's memory in its final form."""

SMALL = 16  # a block is not streamed if the largest one is this many times its size: it would save next to nothing


def blocks(plan: LoadPlan, streamable: re.Pattern[str] | None) -> Blocks:
    """Return the streamable entries (always in memory or streamed) by block. `streamable`: `Network.streamable`."""
    by_block: Blocks = {}
    for name, entry in plan.entries.items():
        match = streamable.match(name) if streamable else None
        if match and entry.residency in (ALWAYS, STREAMED):
            by_block.setdefault(match[1], []).append(entry)
    return by_block


def streamed_blocks(plan: LoadPlan) -> Blocks:
    """Return the streamed entries by block."""
    by_block: Blocks = {}
    for entry in plan.entries.values():
        if entry.residency is STREAMED:
            by_block.setdefault(entry.block, []).append(entry)
    return by_block


def branches(plan: LoadPlan) -> dict[str, LoadPlan]:
    """Return the weights of streamed blocks that have a LoRA branch, as a plan for each block."""
    beside = {path: {e.name for e in block if e.is_branched} for path, block in streamed_blocks(plan).items()}
    return {path: plan.only(names.__contains__) for path, names in beside.items() if names}


@found_once
def peak_weight_bytes(plan: LoadPlan, moved: Moved) -> int:
    """Return the most bytes of weights in memory at once: all that stay, and of the streamed blocks one in use and one
    being read."""
    always = sum(entry.nbytes for entry in plan.entries.values() if entry.residency is ALWAYS)
    return always + in_flight_bytes(plan, moved)


@found_once
def in_flight_bytes(plan: LoadPlan, moved: Moved) -> int:
    """Return the bytes of the streamed blocks that are in memory at once, from the first call on."""
    return _two([_Size.of(block, moved) for block in streamed_blocks(plan).values()])


@found_once
def bytes_per_pass(plan: LoadPlan) -> int:
    """Return the bytes that are read in every pass."""
    every = streamed_blocks(plan).values()
    in_files = (sum(piece.end - piece.begin for entry in block for piece in entry.source.pieces) for block in every)
    return sum(map(max, map(_kept, every), in_files))


def is_read_in_place(entry: Entry, moved: Moved) -> bool:
    """Return whether `entry` is read straight into the memory that computes, without conversion: the file has its final
    form, or its values in 16 bits for a float32 parameter."""
    if entry.fused or (moved is not None and len(entry.shape) == 4 and entry.storage.dtype in moved):
        return False
    if isinstance(entry.storage, Packed):
        stored = entry.source.quant_storage
        is_plain = isinstance(entry.source.code, Affine | BlockFloat)
        return is_plain and stored is not None and stored.code == entry.storage.code
    return entry.source.is_plain and entry.storage.dtype in (entry.source.dtype, "float32")


def stream_to_fit(plan: LoadPlan, streamable: re.Pattern[str] | None, budget: int, moved: Moved) -> LoadPlan:
    """Return `plan` with as few streamed blocks as bring its weights within `budget` bytes. If no choice does, take the
    one with the fewest bytes."""
    whole = peak_weight_bytes(plan, moved)
    choices = [] if whole <= budget else _choices(plan, streamable, moved)
    if not choices:
        return plan
    count, left = next((choice for choice in choices if choice[1] <= budget), min(choices, key=lambda one: one[1]))
    return _with_streamed(plan, streamable, count) if left < whole else plan


@found_once
def _choices(plan: LoadPlan, streamable: re.Pattern[str] | None, moved: Moved) -> list[tuple[int, int]]:
    """Return the possible numbers of streamed blocks, from the fewest on, with the bytes that stay in memory."""
    whole, candidates = peak_weight_bytes(plan, moved), _streamable(blocks(plan, streamable))
    sizes = {path: _Size.of(candidates[path], moved) for path in sorted(candidates, key=_natural)}
    choices = []
    for count in range(3, len(sizes) + 1):  # two are always in memory
        chosen = [sizes[path] for path in _spread(list(sizes), count)]
        choices.append((count, whole + _two(chosen) - sum(size.kept for size in chosen)))
    return choices


@found_once
def _with_streamed(plan: LoadPlan, streamable: re.Pattern[str] | None, count: int) -> LoadPlan:
    """Return `plan` with `count` of its blocks streamed."""
    candidates = _streamable(blocks(plan, streamable))
    return _marked(plan, {path: candidates[path] for path in _spread(sorted(candidates, key=_natural), count)})


def with_streams_of(plan: LoadPlan, other: LoadPlan) -> LoadPlan:
    """Return `plan` with the entries streamed that `other`, of the same parameters, streams."""
    by_block = streamed_blocks(other)
    return _marked(plan, {path: [plan.entries[e.name] for e in block] for path, block in by_block.items()})


@dataclass(frozen=True)
class _Size:
    """The bytes of a block in memory, the bytes of its arrays while they are read ahead, and whether it needs no
    conversion."""

    kept: int
    read: int
    straight: bool

    @staticmethod
    def of(block: list[Entry], moved: Moved) -> _Size:
        nbytes = _kept(block)
        if moved is None:
            return _Size(nbytes, nbytes, straight=True)
        return _Size(nbytes, sum(map(read_bytes, block)), all(is_read_in_place(entry, moved) for entry in block))


def read_bytes(entry: Entry) -> int:
    """Return the bytes of `entry` after it is read and before it is converted."""
    return entry.nbytes if isinstance(entry.storage, Packed) else prod(entry.shape) * BYTES[entry.dtype]


def _kept(block: Iterable[Entry]) -> int:
    """Return the bytes of a block in memory."""
    return sum(entry.nbytes for entry in block)


def _two(sizes: list[_Size]) -> int:
    """Return the bytes of two buffers: the largest block in use, and the largest read ahead. Both have the larger size
    if no block needs conversion."""
    in_use = max((size.kept for size in sizes), default=0)
    if all(size.straight for size in sizes):
        return 2 * in_use
    return in_use + max(size.read for size in sizes)


def _streamable(candidates: Blocks) -> Blocks:
    """Return the blocks that are large enough to stream, and need no quantization when they are read again."""
    largest = max(map(_kept, candidates.values()), default=0)
    return {
        path: block
        for path, block in candidates.items()
        if _kept(block) * SMALL > largest and all(_readable(entry) for entry in block)
    }


def _readable(entry: Entry) -> bool:
    """Return whether reading `entry` again costs only the reading: quantization is done once, and its result stays."""
    if not isinstance(entry.storage, Packed):
        return True
    stored = entry.source.quant_storage
    return stored is not None and stored.code == entry.storage.code and not entry.fused


def _natural(path: str) -> tuple[tuple[str, int], ...]:
    """Return a key that sorts 10 after 9: the order of a pass, but for modules between a UNet's residual blocks."""
    return tuple((name, int(digits or 0)) for name, digits in re.findall(r"([^\d.]+)\.?(\d*)", path))


def _spread(paths: list[str], count: int) -> list[str]:
    """Return `count` of `paths`, evenly spread."""
    total = len(paths)
    return [path for i, path in enumerate(paths) if (i + 1) * count // total > i * count // total]


def _marked(plan: LoadPlan, streamed: Mapping[str, Iterable[Entry]]) -> LoadPlan:
    changed = {
        entry.name: replace(entry, residency=STREAMED, block=path)
        for path, block in streamed.items()
        for entry in block
    }
    return plan.mapped(lambda entry: changed.get(entry.name, entry))
