"""The memory and the operations of a tiny VAE beside its weights, by its configuration: whole, or in bands of rows. A
card's own memory holds no image between two bands."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from qwenimg.common.base.shape import Manifest
from qwenimg.common.memory.memory import MAX_VALUES
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.networks.vaes.tiny_video_vae import BLOCKS, TinyVideoVAEConfig

REACH = 3  # rows that a block sees above and below a band
# The shares of a workspace's copies of images that these convolutions take; measured on both backends in float32
_INPUTS, _OUTPUTS = 0.80, 1.04
_PIXELS = 18  # bytes of a value of the picture while it becomes 8 bits, as of any VAE


class _Layer(NamedTuple):
    """A layer of a level, in channels of all frames: those that a convolution reads and writes, those beside it, and
    those of the image before the layer."""

    inputs: int
    outputs: int
    beside: int
    image: int
    share: float  # of the picture's pixels
    down: int = 1  # rows that it reads for one


def _layers(config: Any, half: str, itemsize: int = 4) -> Iterator[_Layer]:
    """Yield the layer of each level that takes most."""
    levels = config.scale.bit_length()
    if not isinstance(config, TinyVideoVAEConfig):
        [C, *_] = config.encoder_block_out_channels if half == "encoder" else config.decoder_block_out_channels
        yield from (_Layer(C, C, 0, C, 0.25**level) for level in range(levels))
    elif half == "encoder":
        C, first = config.width, config.pools[0]
        joined = first * C * (2 if itemsize == 2 else 1)  # the frames beside each other, in 16 bit twice
        yield _Layer(0, 0, 2 * C + joined, C, 1.0, 2)
        for level in range(1, levels):
            frames = prod(config.pools[level:])
            yield _Layer(2 * frames * C, frames * C, frames * C, frames * C, 0.25**level)
    else:
        frames = 1
        for level, grow in enumerate(config.grows):
            C, following = config.widths[level : level + 2]
            share = 0.25 ** (levels - 1 - level)
            yield _Layer(2 * frames * C, frames * C, frames * C, frames * C, share)
            frames = 1 if level + 1 == len(config.grows) else frames * grow
            yield _Layer(frames * C, frames * following, 0, frames * following, 4 * share)


def _peak(
    config: Any,
    half: str,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool,
) -> int:
    largest, picture = 0.0, 0
    ordered = workspace.ordered and itemsize == 2 and not isinstance(config, TinyVideoVAEConfig)
    inputs, outputs = _INPUTS * workspace.inputs(itemsize), _OUTPUTS * workspace.conv_outputs
    if ordered:  # no copies; the picture in float32 counts, twice before the encoder
        inputs, outputs, picture = 1.0, 1.0, 3 * height * width * (4 if half == "decoder" else 8)
    for layer in _layers(config, half, itemsize):
        whole_rows, columns = height * layer.share**0.5, width * layer.share**0.5
        copies = inputs * layer.inputs + outputs * layer.outputs + (layer.image if ordered else 0)
        if rows is None or rows >= whole_rows:
            largest = max(largest, whole_rows * columns * (copies + layer.beside))
            continue
        read = min(whole_rows, rows * layer.down + 2 * REACH)
        kept = rows if own_memory else whole_rows + rows / layer.down
        largest = max(largest, columns * (kept * layer.image + read * (copies + layer.beside)))
    return int(max(largest * itemsize + picture, 3 * height * width * _PIXELS))


def decode_bytes(
    config: Any,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
) -> int:
    """Return the peak bytes of decoding latents of height x width: whole, or in bands of `rows` rows."""
    sides = height * config.scale, width * config.scale
    return _peak(config, "decoder", *sides, itemsize, workspace, rows, own_memory)


def encode_bytes(
    config: Any,
    height: int,
    width: int,
    itemsize: int,
    workspace: Workspace,
    rows: int | None,
    own_memory: bool = False,
) -> int:
    """Return the peak bytes of encoding a picture of height x width pixels: whole, or in bands of `rows` rows."""
    return _peak(config, "encoder", height, width, itemsize, workspace, rows, own_memory)


def operations(shapes: Manifest, config: Any, height: int, width: int) -> float:
    """Return the multiplications and additions of decoding latents of height x width with weights of these `shapes`."""
    weights = ((name.split("."), shape) for name, shape in shapes.items() if name.startswith("decoder."))
    return sum(2.0 * prod(shape) * _times(config, path) for path, shape in weights if len(shape) > 1) * height * width


def _times(config: Any, path: list[str]) -> int:
    """Return how often a weight of the decoder is used for each latent."""
    if isinstance(config, TinyVideoVAEConfig):
        place = int(path[1])
        level, inside = divmod(max(0, place - 3), BLOCKS + 3)
        frames = prod(config.grows[: min(level, len(config.grows) - 1)])
        return int(4 ** min(level + (inside == BLOCKS + 2), len(config.grows)) * frames)
    return int(4 ** config.decoder_layers[: int(path[2])].count("up"))


def is_small(config: Any, height: int, width: int) -> bool:
    """Return whether kernels can count the values of each image in a decoder for latents of height x width."""
    pixels = height * width * config.scale**2
    most: float = max(max(layer.inputs, layer.outputs) * layer.share for layer in _layers(config, "decoder"))
    return bool(most * pixels < MAX_VALUES)
