"""The time of a download and the machine that a model needs, shown before gigabytes are fetched."""

from __future__ import annotations

import os

from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.catalog import BUILT_IN
from qwenimg.common.families.known_model import KnownModel

RATE = 100e6 / 8  # bytes per second of a usual line
WORTH_SAYING = 60.0  # seconds; shorter times are not shown
LARGE = 10**9  # bytes; for larger downloads the machine's memory is shown


def time_text(count: int) -> str:
    """Return how long `count` bytes take at RATE, for the end of a line; "" for a short time."""
    seconds = count / RATE
    if seconds < WORTH_SAYING:
        return ""
    minutes = round(seconds / 60)
    return f", about {f'{minutes} min' if minutes < 100 else f'{seconds / 3600:.1f} h'} at 100 Mbit/s"


def machine_text(known: KnownModel | None, largest: int) -> str:
    """Return which machine can run a model: a known one, or one whose largest component has `largest` bytes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = largest if known is None else known.memory
    little = f": too little for it; -m {BUILT_IN.name} draws here" if need > memory else ""
    here = f"this machine has {size_text(memory)}{little}"
    if known is None:
        return f"in memory: its largest part has {size_text(largest)} as it is stored; {here}"
    about = f"drawing takes about {size_text(need)} of memory on a GPU or a Mac, twice that on a CPU"
    return f"{known.name}: {known.license}; {about}; {here}"
