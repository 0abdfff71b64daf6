"""Which blocks of a network stay in memory and which are read anew in every pass, for a plan that has to fit.

Two blocks more than those that stay are there at once: one computes, the next one is being read. What is streamed is
spread evenly, so that each block is read while as many others as possible compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from qwenimg.common.precision.residency import ALWAYS, STREAMED
from qwenimg.common.weights.plan import Entry, LoadPlan
from qwenimg.common.weights.storage import Packed

Blocks = dict[int, list[Entry]]


def blocks(plan: LoadPlan, stack: str) -> Blocks:
    """The entries of each block of `stack` that are there as long as it computes, by its number."""
    found: Blocks = {}
    for name, entry in plan.entries.items():
        start, _, rest = name.partition(".")
        number = rest.partition(".")[0]
        if stack and start == stack and number.isdigit() and entry.residency in (ALWAYS, STREAMED):
            found.setdefault(int(number), []).append(entry)
    return found


def streamed_blocks(plan: LoadPlan) -> Blocks:
    """The entries that are streamed, by the number of their block."""
    found: Blocks = {}
    for name, entry in plan.entries.items():
        if entry.residency is STREAMED:
            found.setdefault(int(name.split(".")[1]), []).append(entry)
    return found


def branches(plan: LoadPlan) -> dict[int, LoadPlan]:
    """Of the streamed blocks that have something beside their weights, those weights."""
    found = {number: {e.name for e in block if e.is_beside} for number, block in streamed_blocks(plan).items()}
    return {number: plan.only(names.__contains__) for number, names in found.items() if names}


def stack(plan: LoadPlan) -> str:
    """The path of the list of blocks of which some are streamed."""
    return next(name for name, entry in plan.entries.items() if entry.residency is STREAMED).partition(".")[0]


def held(plan: LoadPlan) -> int:
    """Bytes of weights in memory at once: what always is, and of the streamed blocks the largest, in use, and as it is
    read."""
    always = sum(entry.nbytes for entry in plan.entries.values() if entry.residency is ALWAYS)
    return always + max((_twice(block) for block in streamed_blocks(plan).values()), default=0)


def fitting(plan: LoadPlan, stack: str, budget: int) -> LoadPlan:
    """`plan` with as few blocks of `stack` streamed as leave at most `budget` bytes in memory; where none do, as many
    as can be."""
    if held(plan) <= budget:
        return plan
    chosen = _streamable(blocks(plan, stack))
    if len(chosen) < 3:  # two are in memory anyhow
        return plan
    size = sum(entry.nbytes for entry in next(iter(chosen.values())))
    least = held(plan) + _twice(next(iter(chosen.values())))
    count = min(len(chosen), max(3, -(-(least - budget) // size)))
    return _marked(plan, _spread(sorted(chosen), count), chosen)


def as_in(plan: LoadPlan, other: LoadPlan) -> LoadPlan:
    """`plan` with those entries streamed that `other`, of the same parameters, streams."""
    if not streamed_blocks(other):
        return plan
    entries = {n: replace(e, residency=other.entries[n].residency) for n, e in plan.entries.items()}
    return replace(plan, entries=entries)


def _streamable(found: Blocks) -> Blocks:
    """The blocks that are kept as most of them are, and whose weights can be read again as they are kept."""
    kinds = Counter(_kind(block) for block in found.values())
    usual = kinds.most_common(1)[0][0] if kinds else ()
    return {
        number: block for number, block in found.items() if _kind(block) == usual and all(_readable(e) for e in block)
    }


def _kind(block: Iterable[Entry]) -> tuple[object, ...]:
    return tuple(sorted((e.name.split(".", 2)[2], e.shape, str(e.storage)) for e in block))


def _readable(entry: Entry) -> bool:
    """Whether reading costs no more than reading: codes that are to be made are made once, for good."""
    if not isinstance(entry.storage, Packed):
        return True
    kept = entry.source.kept
    return kept is not None and kept.code == entry.storage.code and not entry.fused


def _spread(numbers: list[int], count: int) -> set[int]:
    """`count` of `numbers`, evenly."""
    total = len(numbers)
    return {n for i, n in enumerate(numbers) if (i + 1) * count // total > i * count // total}


def _marked(plan: LoadPlan, numbers: set[int], found: Blocks) -> LoadPlan:
    names = {entry.name for number in numbers for entry in found[number]}
    entries = {n: replace(e, residency=STREAMED) if n in names else e for n, e in plan.entries.items()}
    return replace(plan, entries=entries)


def _twice(block: Iterable[Entry]) -> int:
    """Bytes of a block as it is kept and as it lies in the file."""
    return sum(e.nbytes + sum(piece.end - piece.begin for piece in e.source.pieces) for e in block)
