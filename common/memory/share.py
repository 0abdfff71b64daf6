"""The share of a machine's memory that a model may take, for machines that are planned for and are not here."""

from __future__ import annotations

GIB = 2**30
# A Mac's GPU may have 2/3 of its memory up to 32 GiB and 3/4 above, unless `sysctl iogpu.wired_limit_mb` says more:
# Metal's recommended working set on Macs of 16, 32, 64 and 96 GiB. Newer systems give 107.5 of 128 GiB.
LARGE_MAC = 32 * GIB
CARD_KEEPS = GIB  # bytes of a card's memory for the driver's context and a desktop


def on_the_box(amount: int) -> int:
    """Return the bytes that a maker means by `amount`: 24 GB on a box are 24 GiB."""
    return amount if amount % 2**20 == 0 else amount * GIB // 10**9


def of_mac(memory: int) -> int:
    """Return the bytes that the GPU of a Mac with `memory` bytes may have."""
    return memory * 3 // 4 if memory > LARGE_MAC else memory * 2 // 3


def of_card(memory: int) -> int:
    """Return the bytes that a program may have on a card with `memory` bytes."""
    return memory - min(CARD_KEEPS, memory // 4)
