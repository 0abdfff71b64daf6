"""Predictions of memory from configurations alone, and the free memory of the system."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from qwenimg.common.memory import limits
from qwenimg.common.memory.workspace import Workspace

MAX_VALUES = 2**31  # values of one array; with more, kernels that count in 32 bits fail


class VAEConfig(Protocol):
    """The fields of a VAE's configuration that a prediction needs, in every family."""

    @property
    def scale(self) -> int: ...

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]: ...

    @property
    def has_shortcuts(self) -> bool:
        """True if each level has a shortcut around all of it, so that it runs over bands as a whole."""
        ...


def free_ram() -> int:
    """Return the bytes that this process can still get from the system and within its limits."""
    available = _meminfo("MemAvailable")
    return _pages() // 2 if available is None else min(available, limits.left())


def machine_ram() -> tuple[int, str]:
    """Return this machine's bytes of memory, and the limit on this process, by its name in messages, that leaves less
    than is free, or ""."""
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit, left = limits.tightest()
    return total or _pages(), limit if available is not None and left < available else ""


def _meminfo(name: str) -> int | None:
    """Return a field of /proc/meminfo in bytes; None where the system has none."""
    info = Path("/proc/meminfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines()) if info.exists() else {}
    return int(fields[name].split()[0]) * 1024 if name in fields else None


def _pages() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ram_peak() -> int | None:
    """Return the most bytes that this process had in memory since the last call; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the bytes in memory now
    except OSError:
        return None
    peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if peak is None else int(peak.split()[1]) * 1024


def decode_peak(config: VAEConfig, height: int, width: int, itemsize: int, workspace: Workspace) -> int:
    """Return the peak bytes of decoding latents of height x width without weights: the inputs and outputs of its widest
    convolution."""
    sizes = convolutions(config, height, width)
    inputs = workspace.inputs(itemsize)
    return int(max(inputs * i + workspace.conv_outputs * o for i, o in sizes) * itemsize)


def encode_peak(width: int, pixels: int, itemsize: int, workspace: Workspace, has_shortcuts: bool) -> int:
    """Return the peak bytes of encoding `pixels` pixels, without weights, with `width` channels in the first level: a
    convolution with the input of its residual block (and of its level, if that has a shortcut), and two copies of the
    image in three channels."""
    held = 2 if has_shortcuts else 1
    return int(((held + workspace.inputs(itemsize) + workspace.conv_outputs) * width + 2 * 3) * pixels * itemsize)


def kept_bytes(width: int, counts: Sequence[int]) -> int:
    """Return the bytes that a step cache keeps of a transformer of this `width` for branches of `counts` tokens: for
    each branch the output of the deeper blocks, for the prompt's the first block's stored and present update and their
    difference, in float32."""
    return (sum(counts) + 3 * counts[0]) * width * 4


def convolutions(config: VAEConfig, height: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the number of values in the input and in the output of each of the decoder's convolutions."""
    blocks = config.up_blocks
    for level, (inputs, outputs, upsampled) in enumerate(blocks):
        pixels = height * width * 4**level
        yield pixels * inputs, pixels * outputs
        yield pixels * outputs, pixels * outputs
        if upsampled:
            following, _, _ = blocks[level + 1]
            yield 4 * pixels * outputs, 4 * pixels * following


def scores(heads: int, branches: int, tokens: int, most: int) -> int:
    """Return the bytes of attention's scores over `tokens` tokens in float32, if a kernel stores them: at most `most`
    (`Workspace.score_bytes`), the bytes of one chunk. Their softmax takes their place."""
    return min(most, 4 * heads * branches * tokens**2)
