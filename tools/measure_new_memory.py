"""How long a block of Qwen-Image's transformer takes to read from cached pages into new memory, and into memory that is
there: what `common/weights/double_buffer.py` saves.

python tools/measure_new_memory.py
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
from collections.abc import Callable

import numpy as np

BLOCK = 680_000_000  # bytes, about: 340 million parameters in bfloat16
ROUNDS = 7


def cpu_seconds(read: Callable[[], object]) -> float:
    """Return the processor time of `read`, in user code and in the kernel."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    read()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print the medians and their ratio, of rounds that take turns."""
    with tempfile.TemporaryFile() as file:
        file.truncate(BLOCK)
        kept = np.empty(BLOCK, np.uint8)

        def into(memory: np.ndarray) -> None:
            os.preadv(file.fileno(), [memory], 0)

        into(kept)
        new, again = [], []
        for _ in range(ROUNDS):
            new.append(cpu_seconds(lambda: into(np.empty(BLOCK, np.uint8))))
            again.append(cpu_seconds(lambda: into(kept)))
    first, second = statistics.median(new), statistics.median(again)
    print(f"{BLOCK / 1e6:.0f} MB: new memory {first:.2f} s, memory that is there {second:.2f} s: {first / second:.1f}")


if __name__ == "__main__":
    main()
