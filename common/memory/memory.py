"""Predictions of memory from configurations alone, and what the system has free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from qwenimg.common.memory import limits

MAX_VALUES = 2**31  # of one array; beyond, kernels that count in 32 bits fail


class VAEConfig(Protocol):
    """What is asked of a VAE's configuration, whatever its family."""

    @property
    def scale(self) -> int: ...

    @property
    def tile_margin(self) -> int: ...

    @property
    def least_tile(self) -> int: ...

    def longest_tile(self, size: int, tile: int) -> int: ...

    @property
    def up_blocks(self) -> tuple[tuple[int, int, bool], ...]: ...


def free_ram() -> int:
    """Bytes that the system, and the limits on this process, could still give to it."""
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        return min(int(fields["MemAvailable"].split()[0]) * 1024, limits.left())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def ram_peak() -> int | None:
    """Bytes that this process had in memory at most since this was last asked; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is what there is now
    except OSError:
        return None
    found = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def decode_peak(config: VAEConfig, height: int, width: int, itemsize: int, buffers: float) -> int:
    """Bytes that decoding latents of height x width takes at its peak, weights aside.

    buffers: how many images of the widest level are in memory at once (`Workspace.decode_buffers`).
    """
    return int(buffers * _largest(config, height, width) * itemsize)


def _largest(config: VAEConfig, height: int, width: int) -> int:
    """Values of the largest array in the decoder."""
    sizes: list[int] = []
    for level, (inputs, outputs, upsampled) in enumerate(config.up_blocks):
        sizes.append(height * width * 4**level * max(inputs, outputs) * (4 if upsampled else 1))
    return max(sizes)


def scores(heads: int, branches: int, tokens: int, most: int) -> int:
    """Bytes of attention's scores over so many tokens and of what is made of them, where a kernel holds them: `most`
    (`Workspace.score_bytes`) is that of one chunk."""
    return min(most, 8 * heads * branches * tokens**2)


def decode_bytes(
    config: VAEConfig, height: int, width: int, itemsize: int, buffers: float, most: int, tile: int | None
) -> int:
    """Bytes that decoding latents of height x width takes at its peak, weights aside: whole, or in tiles of `tile`.

    In tiles: first the whole's mid block, six of its images (its own, and query, key and value), then its result, one
    tile and the picture twice. The picture is then made 8 bit in copies of four floats a value."""
    picture = height * width * config.scale**2 * 3
    if tile is None:
        return max(decode_peak(config, height, width, itemsize, buffers), picture * 18)
    trunk = height * width * config.up_blocks[0][0] * itemsize
    rows, columns = config.longest_tile(height, tile), config.longest_tile(width, tile)
    up = trunk + decode_peak(config, rows, columns, itemsize, buffers) + 2 * picture * itemsize
    return max(6 * trunk + scores(1, 1, height * width, most), up, picture * 18)


def decode_least(config: VAEConfig, height: int, width: int, itemsize: int, buffers: float, most: int) -> int:
    """The fewest bytes that decoding latents of height x width takes, weights aside: whole, or in the smallest
    tiles."""
    return min(decode_bytes(config, height, width, itemsize, buffers, most, tile) for tile in (None, config.least_tile))


def decode_tile(config: VAEConfig, height: int, width: int, itemsize: int, free: int, buffers: float) -> int | None:
    """The largest tile side, in latents, whose predicted peak is within half of `free`; None if no tile is needed."""

    def fits(height: int, width: int) -> bool:
        small = _largest(config, height, width) < MAX_VALUES
        return small and decode_peak(config, height, width, itemsize, buffers) <= free // 2

    if fits(height, width):
        return None
    margin, least = 2 * config.tile_margin, config.least_tile
    side = max(height, width)
    while side > least and not fits(side + margin, side + margin):
        side = max(least, side * 3 // 4)
    return side
