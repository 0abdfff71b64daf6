"""How long a download takes and what machine a model needs, printed before gigabytes are fetched."""

from __future__ import annotations

import os

from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.catalog import BUILT_IN, KnownModel

RATE = 100e6 / 8  # bytes per second of the line that times are given for
WORTH_SAYING = 60.0  # seconds
LARGE = 10**9  # bytes to fetch, from which on the machine is a question


def time_text(count: int) -> str:
    """How long `count` bytes take at RATE, for the end of a line; nothing where that is short."""
    seconds = count / RATE
    if seconds < WORTH_SAYING:
        return ""
    minutes = round(seconds / 60)
    return f", about {f'{minutes} min' if minutes < 100 else f'{seconds / 3600:.1f} h'} at 100 Mbit/s"


def machine_text(known: KnownModel | None, largest: int) -> str:
    """On which machine a model can run: a known one, or one whose largest component has `largest` bytes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = largest if known is None else known.memory
    little = f": too little for it; -m {BUILT_IN.name} draws here" if need > memory else ""
    here = f"this machine has {size_text(memory)}{little}"
    if known is None:
        return f"in memory: its largest part has {size_text(largest)} as it is stored; {here}"
    about = f"drawing takes about {size_text(need)} of memory on a GPU or a Mac, twice that on a CPU"
    return f"{known.name}: {known.license}; {about}; {here}"
