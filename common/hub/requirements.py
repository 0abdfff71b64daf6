"""The time of a download and the machine that a model needs, shown before gigabytes are fetched."""

from __future__ import annotations

import os

from qwenimg.common.base.amounts import size_text
from qwenimg.common.families.catalog import BUILT_IN
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.memory import own_cache

RATE = 100e6 / 8  # bytes per second of a usual line
WORTH_SAYING = 60.0  # seconds; shorter times are not shown
ENOUGH = 50 * 10**6  # bytes of a download whose speed is kept
_FILE, _SPEED = "download.json", "bytes a second of the last download"
LARGE = 10**9  # bytes; for larger downloads the machine's memory is shown


def time_text(count: int) -> str:
    """Return how long `count` bytes take at the speed of the last download, or else at RATE, for the end of a line; ""
    for a short time."""
    last = own_cache.number(_FILE, _SPEED)
    seconds = count / (last or RATE)
    if seconds < WORTH_SAYING:
        return ""
    minutes = round(seconds / 60)
    speed = "the speed of the last download" if last else "100 Mbit/s"
    return f", about {f'{minutes} min' if minutes < 100 else f'{seconds / 3600:.1f} h'} at {speed}"


def keep_speed(count: int, seconds: float) -> None:
    """Keep the speed of a download of `count` bytes, unless it was too short to tell."""
    if count >= ENOUGH and seconds > 0:
        own_cache.keep(_FILE, {_SPEED: count / seconds})


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
