"""The 16-bit dtypes in which chips and cards multiply fast and right, and the facts of one device.

Sources: Apple's Metal feature set tables (bfloat16 in hardware from the family of M3 and A17 on), NVIDIA's CUDA C++
Programming Guide, "Arithmetic Instructions" (results per clock by compute capability). Nothing here was measured:
`qwenimg doctor` measures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

BF16, FP16 = "bfloat16", "float16"
BOTH = frozenset({BF16, FP16})


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of one backend."""

    name: str  # for messages
    on_gpu: bool
    units: frozenset[str]  # the 16-bit dtypes that it has units for
    about: str  # the same as a predicate for messages: `has units for bfloat16`
    own_memory: bool = False  # whether weights reach it from the system's memory over a link
    lanes: int = 16  # the width of that link, in lanes of PCI Express 4.0
    emulates: bool = False  # whether it emulates 16 bit in float32, at no gain


class Units(NamedTuple):
    dtypes: frozenset[str]
    about: str


_BF16 = Units(BOTH, "has units for bfloat16")
_NO_BF16 = Units(frozenset({FP16}), "has units for float16 and none for bfloat16")
_SLOW = Units(frozenset(), "multiplies float16 at a fraction of float32's speed")
_WRONG = Units(frozenset(), "is of a series whose float16 is reported to give black pictures")

# Patterns of chips' names; the first match counts. Any other chip of Apple's is newer
CHIPS: tuple[tuple[str, Units], ...] = (
    (r"M[12]\b|A1[0-6]\b", _NO_BF16),
    (r"", _BF16),
)
# Patterns of cards' names, which come before the compute capability; the first match counts
CARDS: tuple[tuple[str, Units], ...] = (
    (r"\b(GTX )?16[356]0\b|\bT(500|550|600|1000|1200|2000)\b|\bMX[45]50\b|\bCMP 30HX\b", _WRONG),
)
# Cards with eight lanes, or with sixteen of PCI Express 3.0, which are half as fast
EIGHT_LANES = r"\bRTX (4060|20\d0)\b"
# The least compute capability of each, the newest first
CAPABILITIES: tuple[tuple[tuple[int, int], Units], ...] = (
    ((8, 0), _BF16),  # Ampere, Ada, Hopper, Blackwell
    ((7, 0), _NO_BF16),  # Volta, Turing
    ((6, 1), _SLOW),  # Pascal but for the P100
    ((6, 0), _NO_BF16),  # P100
    ((0, 0), _SLOW),
)


def apple(name: str) -> Device:
    """Return a chip by its name, such as `Apple M4 Max`."""
    units = next(units for pattern, units in CHIPS if re.match(pattern, name.removeprefix("Apple ")))
    return _gpu(name, units)


def nvidia(name: str, capability: tuple[int, int]) -> Device:
    """Return a card by its name and compute capability."""
    named = (units for pattern, units in CARDS if re.search(pattern, name))
    by_number = next(units for least, units in CAPABILITIES if capability >= least)
    units = next(named, by_number) if capability < (8, 0) else by_number
    return replace(_gpu(name, units), own_memory=True, lanes=8 if re.search(EIGHT_LANES, name) else 16)


def cpu(name: str, *, bf16: bool, emulates: bool = False) -> Device:
    """Return a CPU. bf16: whether it has instructions for bfloat16 products; emulates: whether the backend emulates
    16 bit there."""
    units = frozenset({BF16}) if bf16 else frozenset[str]()
    about = "has instructions for bfloat16" if bf16 else "has no instructions for bfloat16"
    if emulates:
        about = "gains nothing from 16 bit"
    return Device(name=name, on_gpu=False, units=units, about=about, emulates=emulates)


def _gpu(name: str, units: Units) -> Device:
    return Device(name=name, on_gpu=True, units=units.dtypes, about=units.about)
