"""The memory of a VAE besides its weights: with the whole image at once, or in bands of rows. In bands, one image
between two layers is in memory (on a card: in the host's memory), and a convolution reads and writes one band."""

from __future__ import annotations

from qwenimg.common.memory.memory import MAX_VALUES, VAEConfig, convolutions, decode_peak, encode_peak, scores
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.numbers.tiles import wide_upsamplers

ROWS = (64, 32, 16, 8)  # rows of a band: with fewer, more rows are read beside a band than in it
BESIDE = 8  # rows that are read beside a band, by the part of a network with the widest view
BESIDE_LEVEL = 28  # where the part is a whole level with a shortcut
SHORTCUT = 1.5  # images of a band in an encoder's first level that stay for its shortcut; measured


def decode_bytes(
    config: VAEConfig,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
) -> int:
    """Return the peak bytes of decoding latents of height x width: whole, or in bands of `rows` rows.

    In bands it is the largest of three peaks: the mid block over the whole image, with six images of its size (its own,
    query, key and value among them) and attention's scores; the up blocks, with the mid block's result, the kept image,
    a band and the output twice; and the conversion to 8 bits, in copies of four floats a value. own_memory: the device
    is a card, whose own memory holds no kept image."""
    picture = height * width * config.scale**2 * 3
    if rows is None:
        return max(decode_peak(config, height, width, itemsize, workspace), picture * 18)
    trunk = height * width * config.up_blocks[0][0] * itemsize
    between = 0 if own_memory else _largest(config, height, width) * itemsize
    up = trunk + between + _band(config, height, width, itemsize, workspace, rows) + 2 * picture * itemsize
    return max(6 * trunk + scores(1, 1, height * width, workspace.score_bytes), up, picture * 18)


def _largest(config: VAEConfig, height: int, width: int) -> int:
    """Return the number of values of the largest image that is kept between two parts of a decoder."""
    blocks = config.up_blocks
    if config.has_shortcuts:
        return height * width * max(outputs << 2 * (level + up) for level, (_, outputs, up) in enumerate(blocks))
    wide = [False, *wide_upsamplers(blocks)]
    widths = [outputs if wide[i] else max(inputs, outputs) for i, (inputs, outputs, _) in enumerate(blocks)]
    return height * width * max(channels << 2 * level for level, channels in enumerate(widths))


def _band(config: VAEConfig, height: int, width: int, itemsize: int, workspace: Workspace, rows: int) -> int:
    """Return the bytes of a decoder's largest convolution over one band, including its weight in the kernel's order."""
    values, read = [], rows + (BESIDE_LEVEL if config.has_shortcuts else BESIDE)
    for level, (inputs, outputs, upsampled) in enumerate(config.up_blocks):
        pixels = min(read, height * 2**level) * width * 2**level
        values.append(_convolved(inputs, outputs, pixels, workspace, itemsize))
        if upsampled:
            pixels = min(read, height * 2 ** (level + 1)) * width * 2 ** (level + 1)
            values.append(_convolved(outputs, config.up_blocks[level + 1][0], pixels, workspace, itemsize))
    return int(max(values) * itemsize)


def _convolved(inputs: int, outputs: int, pixels: int, workspace: Workspace, itemsize: int) -> float:
    """Return the number of values of a convolution's input, output and weight."""
    return pixels * (workspace.inputs(itemsize) * inputs + workspace.conv_outputs * outputs) + 9 * inputs * outputs


def encode_bytes(
    channels: int,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
    has_shortcuts: bool = False,
) -> int:
    """Return the peak bytes of encoding an image of height x width pixels, in a first level of `channels` channels:
    whole, or in bands of `rows` rows, for which a downsampler reads twice as many. has_shortcuts: see `VAEConfig`."""
    if rows is None:
        return encode_peak(channels, height * width, itemsize, workspace, has_shortcuts)
    kept = SHORTCUT * channels * itemsize if has_shortcuts else 0.0  # a pixel
    between = 0 if own_memory else channels * height * width * itemsize
    read, written = min(2 * rows + BESIDE, height), min(rows + BESIDE, height) / 2
    band = channels * width * (workspace.inputs(itemsize) * read + workspace.conv_outputs * written) * itemsize
    weight = 9 * (4 * channels) ** 2 * itemsize  # the last level's, which is 4 times as wide, in the kernel's order
    band += kept * width * read
    return int(between + band + weight + 4 * 3 * height * width * itemsize)


def is_small(config: VAEConfig, height: int, width: int) -> bool:
    """Return whether kernels can count the values of each image in a decoder for latents of height x width."""
    return max(map(max, convolutions(config, height, width))) < MAX_VALUES
