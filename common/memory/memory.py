"""Predictions of memory from configurations alone, and what the system has free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from qwenimg.common.memory import limits
from qwenimg.common.memory.workspace import Workspace

MAX_VALUES = 2**31  # of one array; beyond, kernels that count in 32 bits fail


class VAEConfig(Protocol):
    """What is asked of a VAE's configuration, whatever its family."""

    @property
    def scale(self) -> int: ...

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]: ...


def free_ram() -> int:
    """Bytes that the system, and the limits on this process, could still give to it."""
    available = _meminfo("MemAvailable")
    return _pages() // 2 if available is None else min(available, limits.left())


def machine_ram() -> tuple[int, str]:
    """Bytes of memory that this machine has, and the limit on this process that leaves less than is free of them, as a
    message names it."""
    total, available = _meminfo("MemTotal"), _meminfo("MemAvailable")
    limit, left = limits.tightest()
    return total or _pages(), limit if available is not None and left < available else ""


def _meminfo(name: str) -> int | None:
    """Bytes; None where the system does not say."""
    info = Path("/proc/meminfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines()) if info.exists() else {}
    return int(fields[name].split()[0]) * 1024 if name in fields else None


def _pages() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ram_peak() -> int | None:
    """Bytes that this process had in memory at most since this was last asked; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is what there is now
    except OSError:
        return None
    found = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def decode_peak(config: VAEConfig, height: int, width: int, itemsize: int, workspace: Workspace) -> int:
    """Bytes that decoding latents of height x width takes at its peak, weights aside: in its widest convolution."""
    sizes = convolutions(config, height, width)
    return int(max(workspace.conv_inputs * i + workspace.conv_outputs * o for i, o in sizes) * itemsize)


def encode_peak(width: int, pixels: int, itemsize: int, workspace: Workspace) -> int:
    """Bytes that encoding so many pixels takes at its peak, weights aside: in a first level of `width` channels."""
    return int((workspace.conv_inputs + workspace.conv_outputs) * width * pixels * itemsize)


def convolutions(config: VAEConfig, height: int, width: int) -> Iterator[tuple[int, int]]:
    """Values of the images that the decoder's convolutions take and make."""
    blocks = config.up_blocks
    for level, (inputs, outputs, upsampled) in enumerate(blocks):
        pixels = height * width * 4**level
        yield pixels * inputs, pixels * outputs
        yield pixels * outputs, pixels * outputs
        if upsampled:
            following, _, _ = blocks[level + 1]
            yield 4 * pixels * outputs, 4 * pixels * following


def scores(heads: int, branches: int, tokens: int, most: int) -> int:
    """Bytes of attention's scores over so many tokens and of what is made of them, where a kernel holds them: `most`
    (`Workspace.score_bytes`) is that of one chunk."""
    return min(most, 8 * heads * branches * tokens**2)
