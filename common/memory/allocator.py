"""Settings of glibc for freed memory: on a CPU it is the allocator of torch, MLX and numpy alike.

By default, glibc keeps freed blocks of up to 32 MB in its heap, in holes that are too small for the next block. The
settings hold for the whole process. Other C libraries do not have them, and then nothing happens here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Bytes from which on a block is mapped alone, and so given back when it is freed. With 1 MB a run of Stable Diffusion
# with a limit of 220 MB kept 25 MB in holes, with 256 kB none. With 256 kB a run of SDXL, whose 70 transformer blocks
# make activations of 120 to 250 kB, kept 70 MB, with 128 kB none. New pages take up to a twentieth of the CPU time.
MAPPED = 2**17
SMALL_RUN = 64 * 10**6  # bytes; in a smaller run the holes are no larger than Python's own, and new pages cost more
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


def give_back_blocks(peak: int) -> None:
    """Make glibc return large freed blocks to the system, for a run that is planned to take `peak` bytes."""
    if peak >= SMALL_RUN and (mallopt := _of_libc("mallopt")):
        mallopt(_MMAP_THRESHOLD, MAPPED)


def give_back_heap() -> None:
    """Make glibc return the free pages of its heaps to the system."""
    if malloc_trim := _of_libc("malloc_trim"):
        malloc_trim(0)


def _of_libc(name: str) -> Callable[..., Any] | None:
    """Return the function `name` of the C library, or None where that has none."""
    import ctypes

    return getattr(ctypes.CDLL(None), name, None)
