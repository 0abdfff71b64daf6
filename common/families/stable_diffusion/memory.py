"""What a step of a Stable Diffusion UNet takes."""

from __future__ import annotations

from qwenimg.common.networks.unet import UNetConfig

UNET_BUFFERS = 30  # arrays of the UNet's first level that a step has in memory at its peak


def step_peak(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Bytes of activations in one step of a UNet with so many branches in one batch, for latents of height x width.

    Per pixel of the first level: what is kept for the up blocks, and a feed-forward's eight widths, in float32.
    """
    return branches * height * width * config.block_out_channels[0] * 4 * UNET_BUFFERS


def kept_bytes(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Bytes that a step cache keeps for so many branches: what goes into the last up block, and what the first down
    block made, then and now, in float32."""
    first, deeper = config.block_out_channels[0], config.block_out_channels[:2][-1]
    return branches * height * width * (deeper + 2 * first) * 4
