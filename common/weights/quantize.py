"""Policies for quantizing weights: which layers, in how many bits.

Measured (docs/measured/weights.md): the first and the last two blocks and the modulation cost little in 8 bits and
much in 4. Layers outside of the blocks stay as they are. The VAE and convolutions are never quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.found_once import found_once
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import TensorSlice
from qwenimg.common.precision.residency import ONCE
from qwenimg.common.quant.affine import BITS4, BITS6, BITS8, Affine
from qwenimg.common.quant.quantized_tensor import QuantStorage
from qwenimg.common.weights.plan import Entry, LoadPlan, Source
from qwenimg.common.weights.storage import Dense, Packed, QuantFormat

# Other programs' words: 4bit, nf4, int8, fp8, q4_0, q6_k
_OTHERS = re.compile(r"(?:bnb-?|u?int|nf|fp|float|mxfp|nvfp|q|w)?-?([864])(?:-?bits?|_[k01](?:_[sml])?|_?e\dm\d\w*)?")
SYNTAX = "8, 6 or 4, or by part: text=8,transformer=4"


@dataclass(frozen=True)
class Policy:
    """The codes of a denoiser's blocks, and of its first and last two and its modulation; or of a text encoder's
    layers."""

    blocks: Affine
    rest: Affine = BITS8


POLICIES: Mapping[str, Mapping[str, Policy]] = {
    "8": {"transformer": Policy(BITS8), "text": Policy(BITS8)},
    "6": {"transformer": Policy(BITS6), "text": Policy(BITS8)},
    "4": {"transformer": Policy(BITS4), "text": Policy(BITS6)},
}


def parse(text: str) -> dict[str, Policy]:
    """Return the policy of each role that `text` (SYNTAX) names. Raises UsageError."""
    policies, named = dict[str, Policy](), set[str]()
    for part in text.strip().lower().replace("unet=", "transformer=").split(","):
        role, _, bits = part.strip().rpartition("=")
        if bits not in POLICIES or role not in ("", "text", "transformer"):
            known = None if bits in POLICIES else _OTHERS.fullmatch(bits)
            near = f"did you mean -q {known[1]}? It takes {SYNTAX}" if known else f"give {SYNTAX}"
            raise UsageError(f"--quantize {clean(text, 40)!r}: cannot read {clean(part, 40)!r}; {near}")
        if role in named or (not role and named):
            raise UsageError(f"--quantize {clean(text, 40)!r}: {clean(part, 40)!r} says again what stands before it")
        named.add(role)
        if not role:
            policies |= POLICIES[bits]
        elif role == "text":
            policies[role] = Policy(POLICIES[bits]["transformer"].blocks)
        else:
            policies[role] = POLICIES[bits][role]
    return policies


def keep(plan: LoadPlan, tables: frozenset[str]) -> LoadPlan:
    """Return `plan` with the weights that are quantized in its files kept quantized. `tables` are decoded: their rows
    are looked up, not multiplied."""

    def of_file(entry: Entry) -> QuantStorage[QuantFormat] | None:
        storage = entry.source.quant_storage
        return storage if storage and entry.name not in tables and storage.code.fits(entry.shape) else None

    return plan.mapped(lambda entry: replace(entry, table=entry.name in tables)).packed(of_file)


def in_4_bits(plan: LoadPlan) -> bool:
    """Return whether weights of `plan` are kept in codes of 4 bits or fewer, without their scales."""
    packed = (entry for entry in plan.entries.values() if isinstance(entry.storage, Packed))
    return any(8 * entry.storage.nbytes(entry.shape) < 6 * prod(entry.shape) for entry in packed)


def as_stored(plan: LoadPlan) -> LoadPlan:
    """Return `plan` without the quantization by `quantized`; weights that are quantized in its files stay so. It is
    the same plan if nothing changes, so that facts known of it still hold."""
    return _dense(plan, kept=False)


def decoded(plan: LoadPlan) -> LoadPlan:
    """Return `plan` with the weights that are quantized in its files decoded as they are read. It is the same plan if
    there are none."""
    return _dense(plan, kept=True)


def _dense(plan: LoadPlan, *, kept: bool) -> LoadPlan:
    """Return `plan` with plain weights for those whose codes are `kept` from its files, or for all other codes."""

    def plain(entry: Entry) -> Entry:
        of_file, storage = entry.source.quant_storage, entry.storage
        if not isinstance(storage, Packed) or (of_file is not None and of_file.code == storage.code) != kept:
            return entry
        return replace(entry, storage=Dense(storage.dtype))

    changed = plan.mapped(plain)
    return plan if all(entry is plan.entries[name] for name, entry in changed.entries.items()) else changed


def converted(plan: LoadPlan) -> LoadPlan:
    """Return `plan` with the codes that `quantized` chose as if its files had them, as `qwenimg convert` writes
    them, so that their blocks can be streamed."""
    return plan.mapped(_in_codes)


def _in_codes(entry: Entry) -> Entry:
    """Return `entry` with a source that has the codes of its storage, unless the file has them already."""
    storage, of_file = entry.storage, entry.source.quant_storage
    if not (isinstance(storage, Packed) and isinstance(storage.code, Affine)) or (
        of_file and of_file.code == storage.code
    ):
        return entry
    code, file, (rows, width) = storage.code, entry.source.first.file, entry.shape
    words, groups = width * code.bits // 32, width // code.group
    pieces = (("U32", words, 4), *[("F16", groups, 2)] * len(code.parts))
    tensors = tuple(TensorSlice(entry.name, file, dtype, (rows, n), 0, rows * n * size) for dtype, n, size in pieces)
    return replace(entry, source=Source(tensors, code))


@found_once
def quantized(plan: LoadPlan, policy: Policy, blocks: re.Pattern[str]) -> LoadPlan:
    """Return `plan` with the matrices that `blocks` matches quantized as `policy` says. A group in `blocks` is the
    number of the block.

    Weights that are quantized already stay so; rows that no group divides stay as they are.
    """
    matches = {name: match for name in plan.entries if (match := blocks.fullmatch(name))}
    order = sorted({int(match[1]) for match in matches.values() if match.re.groups})
    ends = {*order[:1], *order[-2:]}

    def chosen(entry: Entry) -> QuantStorage[QuantFormat] | None:
        match = matches.get(entry.name)
        if match is None or len(entry.shape) != 2 or isinstance(entry.storage, Packed):
            return None
        end = bool(match.re.groups) and int(match[1]) in ends
        code = policy.rest if end or entry.residency is ONCE else policy.blocks
        codes = [code, *(code._replace(group=group) for group in (64, 32) if group < code.group)]
        return next((QuantStorage(one, 2) for one in codes if one.fits(entry.shape)), None)

    return plan.packed(chosen)
