"""Bytes and operations of Stable Cascade's UNets, of its VAE and of its encoder of pictures."""

from __future__ import annotations

from math import prod

from qwenimg.common.base.shape import Manifest
from qwenimg.common.memory.workspace import Workspace
from qwenimg.common.networks.denoisers.cascade_unet import WIDER, CascadeConfig, Level
from qwenimg.common.networks.vaes.effnet import EffnetConfig
from qwenimg.common.networks.vaes.paella_vae import PaellaConfig

# Copies in float32 of the result of a kernel in 16 bit with its norm, measured: on torch, and where kernels make more
_WIDE, _WIDE_KERNELS = 2, 8


def sides(config: CascadeConfig, rows: int, columns: int) -> list[tuple[int, int]]:
    """Return rows and columns of tokens of each level, for `rows` x `columns` latents."""
    first = rows // config.patch_size, columns // config.patch_size
    halves = range(len(config.block_out_channels))
    return [first if config.one_size else (first[0] >> level, first[1] >> level) for level in halves]


def step_peak(config: CascadeConfig, rows: int, columns: int) -> int:
    """Return the bytes of activations in one step.

    The widest level's tokens have the stream, the norm of it, its image, and a feed-forward's width before and behind
    GELU and in its norm, all in float32; and each level keeps its stream for the way up."""
    tokens = [h * w for h, w in sides(config, rows, columns)]
    widths = config.block_out_channels
    kept = sum(count * width for count, width in zip(tokens, widths, strict=True))
    widest = max(count * width for count, width in zip(tokens, widths, strict=True))
    return 4 * (kept + (4 + 3 * WIDER) * widest)


def step_operations(config: CascadeConfig, rows: int, columns: int, text: int) -> float:
    """Count the operations of one prediction for `text` tokens of the condition."""
    tokens = [h * w for h, w in sides(config, rows, columns)]
    down, up = config.down, config.up
    every = [*zip(down, tokens, strict=True), *zip(up, reversed(tokens), strict=True)]
    return sum(_level(config, level, count, text) for level, count in every)


def _level(config: CascadeConfig, level: Level, tokens: int, text: int) -> float:
    """Each layer has a kernel of each channel, two products of a feed-forward, and where it attends four squares of the
    width for a token, with attention to all and to the condition."""
    products = tokens * (config.kernel_size**2 * level.width + 2 * WIDER * level.width**2)
    if level.heads:
        products += 4 * tokens * level.width**2 + 2 * tokens * (tokens + text) * level.width
    return 2.0 * level.repeats * level.layers * products


def decode_bytes(config: PaellaConfig, rows: int, columns: int, itemsize: int, band: int | None) -> int:
    """Return the bytes of decoding latents of rows x columns, in bands of `band` rows of pixels or as a whole: each
    level has its image, and of a band the norm, and a feed-forward's width before and behind GELU in float32 at
    least."""
    whole = rows * config.scale
    share = 1.0 if band is None else min(1.0, (band + 2 * config.scale) / whole)
    levels = [rows * columns * 4**i * width for i, width in enumerate(reversed(config.widths))]
    picture = 3 * rows * columns * config.scale**2
    return int(max(values * (2 * itemsize + share * 4 * (3 + 2.5 * WIDER)) for values in levels) + 18 * picture)


def decode_operations(shapes: Manifest, config: PaellaConfig, rows: int, columns: int) -> float:
    """Count the operations of decoding latents of rows x columns with weights of these `shapes`."""
    ups = [place for place, (kind, _) in enumerate(config.decoder) if kind == "up"]

    def times(name: str) -> int:
        place = int(name.split(".")[1]) if name.startswith("up_blocks.") else len(config.decoder)
        return int(4 ** sum(up < place for up in ups))

    matrices = ((name, shape) for name, shape in shapes.items() if len(shape) > 1)
    return float(sum(2.0 * prod(shape) * times(name) for name, shape in matrices) * rows * columns)


def encode_bytes(config: EffnetConfig, height: int, width: int, itemsize: int, workspace: Workspace) -> int:
    """Return the bytes of encoding a picture of height x width: of the layer that takes most, the block's input, the
    copies of what a 3x3 kernel reads and makes, and in 16 bit its norm in float32."""
    peak, pixels = 0.0, height * width // 4
    for block in (block for blocks in config.stages for block in blocks):
        read = block.inputs if block.fused else block.hidden
        made = (block.outputs if block.is_one else block.hidden) * pixels // block.stride**2
        copies = workspace.inputs(itemsize) * read * pixels + workspace.conv_outputs * made
        wide = 4 * (_WIDE_KERNELS if workspace.wide_inputs else _WIDE) * made if itemsize < 4 else 0
        peak = max(peak, (block.inputs * pixels + copies) * itemsize + wide)
        pixels //= block.stride**2
    return int(peak)
