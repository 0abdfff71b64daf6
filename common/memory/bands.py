"""What a VAE takes beside its weights: with the image whole, or with layers that run over bands of its rows.

In bands one image between two layers is kept, on a card in the memory of the host, and a convolution takes and makes
one band of rows.
"""

from __future__ import annotations

from qwenimg.common.memory.memory import MAX_VALUES, VAEConfig, convolutions, decode_peak, encode_peak, scores
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.numbers.tiles import wide_upsamplers

ROWS = (64, 32, 16, 8)  # of a band: with fewer, more is read beside a band than in it
BESIDE = 8  # rows that are read beside a band, of the part of a network that sees most


def decode_bytes(
    config: VAEConfig,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
) -> int:
    """Return the bytes that decoding latents of height x width takes at its peak: whole, or in bands of `rows` rows.

    In bands: first the whole's mid block, six of its images (its own, and query, key and value), then its result, the
    image that is kept, a band and the picture twice. The picture is then made 8 bit in copies of four floats a value.
    own_memory: whether the device is a card, which keeps no such image."""
    picture = height * width * config.scale**2 * 3
    if rows is None:
        return max(decode_peak(config, height, width, itemsize, workspace), picture * 18)
    trunk = height * width * config.up_blocks[0][0] * itemsize
    kept = 0 if own_memory else _largest(config, height, width) * itemsize
    up = trunk + kept + _band(config, height, width, itemsize, workspace, rows) + 2 * picture * itemsize
    return max(6 * trunk + scores(1, 1, height * width, workspace.score_bytes), up, picture * 18)


def _largest(config: VAEConfig, height: int, width: int) -> int:
    """Return the values of the largest image that is kept between two parts of a decoder."""
    blocks = config.up_blocks
    wide = [False, *wide_upsamplers(blocks)]
    widths = [outputs if wide[i] else max(inputs, outputs) for i, (inputs, outputs, _) in enumerate(blocks)]
    return height * width * max(channels << 2 * level for level, channels in enumerate(widths))


def _band(config: VAEConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int) -> int:
    """Return the bytes of the largest convolution of a decoder over one band, its weight in the kernel's order among
    them."""
    taken = []
    for level, (inputs, outputs, upsampled) in enumerate(config.up_blocks):
        there = min(rows + BESIDE, height * 2**level) * width * 2**level
        taken.append(_convolved(inputs, outputs, there, workspace))
        if upsampled:
            there = min(rows + BESIDE, height * 2 ** (level + 1)) * width * 2 ** (level + 1)
            taken.append(_convolved(outputs, config.up_blocks[level + 1][0], there, workspace))
    return int(max(taken) * itemsize)


def _convolved(inputs: int, outputs: int, pixels: int, workspace: Workspace) -> float:
    """Return the values of what a convolution takes and makes and of its weight."""
    return pixels * (workspace.conv_inputs * inputs + workspace.conv_outputs * outputs) + 9 * inputs * outputs


def encode_bytes(
    channels: int,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
) -> int:
    """Return the bytes that encoding a picture of height x width pixels takes at its peak, in a first level of so many
    channels: whole, or in bands of `rows` rows, of which a downsampler reads twice as many."""
    if rows is None:
        return encode_peak(channels, height * width, itemsize, workspace)
    kept = 0 if own_memory else channels * height * width * itemsize
    read, made = min(2 * rows + BESIDE, height), min(rows + BESIDE, height) / 2
    band = channels * width * (workspace.conv_inputs * read + workspace.conv_outputs * made) * itemsize
    weight = 9 * (4 * channels) ** 2 * itemsize  # of the last level, which is that much wider, in the kernel's order
    return int(kept + band + weight + 4 * 3 * height * width * itemsize)


def is_small(config: VAEConfig, height: int, width: int) -> bool:
    """Return whether kernels can count the values of each image in a decoder for latents of height x width."""
    return max(map(max, convolutions(config, height, width))) < MAX_VALUES
