"""Policies for keeping weights in codes: of which layers, in how many bits.

Measured (docs/weights.md): the first and the last two blocks and the modulation cost little in 8 bits and much in 4;
what stands outside of the blocks stays as it is. The VAE and convolutions are never coded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean
from qwenimg.common.codes.affine import BITS4, BITS6, BITS8, Affine, Kept
from qwenimg.common.formats.stored import Piece
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.weights.plan import Entry, LoadPlan, Source
from qwenimg.common.weights.storage import Dense, Packed

SYNTAX = "8, 6 or 4, or by part: text=8,transformer=4"


@dataclass(frozen=True)
class Policy:
    """Codes of a denoiser's blocks, of its first and last two and of its modulation; or of a text encoder's layers."""

    blocks: Affine
    rest: Affine = BITS8


POLICIES: Mapping[str, Mapping[str, Policy]] = {
    "8": {"transformer": Policy(BITS8), "text": Policy(BITS8)},
    "6": {"transformer": Policy(BITS6), "text": Policy(BITS8)},
    "4": {"transformer": Policy(BITS4), "text": Policy(BITS6)},
}


def parse(text: str) -> dict[str, Policy]:
    """The policy of each role that `text` (SYNTAX) names. Raises UsageError."""
    found: dict[str, Policy] = {}
    for part in text.strip().lower().replace("unet=", "transformer=").split(","):
        role, _, bits = part.strip().rpartition("=")
        if bits not in POLICIES or role not in ("", "text", "transformer"):
            raise UsageError(f"--quantize {clean(text, 40)!r}: cannot read {clean(part, 40)!r}; give {SYNTAX}")
        if not role:
            found |= POLICIES[bits]
        elif role == "text":
            found[role] = Policy(POLICIES[bits]["transformer"].blocks)
        else:
            found[role] = POLICIES[bits][role]
    return found


def keep(plan: LoadPlan, tables: frozenset[str]) -> LoadPlan:
    """`plan` with the codes that its files have kept as they are, but for `tables`, which are looked up and not
    multiplied."""

    def own(entry: Entry) -> Kept | None:
        kept = entry.source.kept
        return kept if kept and entry.name not in tables and kept.code.fits(entry.shape) else None

    marked = {name: replace(entry, table=name in tables) for name, entry in plan.entries.items()}
    return replace(plan, entries=marked).packed(own)


def as_stored(plan: LoadPlan) -> LoadPlan:
    """`plan` without the codes that `quantised` gave its matrices; those of its files stay. The same plan where there
    are none, of which what was found holds still."""

    def stored(entry: Entry) -> Entry:
        own = entry.source.kept
        if not isinstance(entry.storage, Packed) or (own is not None and own.code == entry.storage.code):
            return entry
        return replace(entry, storage=Dense(entry.storage.dtype))

    entries = {name: stored(entry) for name, entry in plan.entries.items()}
    same = all(entry is plan.entries[name] for name, entry in entries.items())
    return plan if same else replace(plan, entries=entries)


def converted(plan: LoadPlan) -> LoadPlan:
    """Return `plan` with the codes that `quantised` chose as if its files had them, as `qwenimg convert` writes them,
    so that blocks of them can be streamed."""
    return replace(plan, entries={name: _stored(entry) for name, entry in plan.entries.items()})


def _stored(entry: Entry) -> Entry:
    storage, own = entry.storage, entry.source.kept
    if not (isinstance(storage, Packed) and isinstance(storage.code, Affine)) or (own and own.code == storage.code):
        return entry
    code, file, (rows, width) = storage.code, entry.source.first.file, entry.shape
    words, groups = width * code.bits // 32, width // code.group
    pieces = (("U32", words, 4), *[("F16", groups, 2)] * len(code.parts))
    tensors = tuple(Piece(entry.name, file, dtype, (rows, n), 0, rows * n * size) for dtype, n, size in pieces)
    return replace(entry, source=Source(tensors, code))


def quantised(plan: LoadPlan, policy: Policy, blocks: re.Pattern[str]) -> LoadPlan:
    """`plan` with the matrices that `blocks` names, by the number of their block where it has a group, kept as `policy`
    says. What is kept in codes already stays so; rows that no group divides stay as they are."""
    numbers = {name: found for name in plan.entries if (found := blocks.fullmatch(name))}
    order = sorted({int(found[1]) for found in numbers.values() if found.re.groups})
    ends = {*order[:1], *order[-2:]}

    def chosen(entry: Entry) -> Kept | None:
        found = numbers.get(entry.name)
        if found is None or len(entry.shape) != 2 or isinstance(entry.storage, Packed):
            return None
        end = bool(found.re.groups) and int(found[1]) in ends
        code = policy.rest if end or entry.residency is ONCE else policy.blocks
        codes = [code, *(Affine(code.bits, group) for group in (64, 32) if group < code.group)]
        return next((Kept(one, 2) for one in codes if one.fits(entry.shape)), None)

    return plan.packed(chosen)
