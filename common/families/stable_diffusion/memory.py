"""Bytes of a step of a Stable Diffusion UNet."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.unet import UNetConfig

UNET_BUFFERS = 30  # arrays of the UNet's first level that a step has in memory at its peak


def step_peak(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Return the bytes of activations in one step with `branches` in one batch, for latents of height x width.

    Each pixel of the first level has the arrays for the up blocks and a feed-forward's eight widths, in float32."""
    return branches * height * width * config.block_out_channels[0] * 4 * UNET_BUFFERS


def kept_bytes(config: UNetConfig, branches: int, height: int, width: int) -> int:
    """Return the bytes that a step cache keeps for `branches`: the input of the last up block, and the stored and the
    present output of the first down block, in float32."""
    first, deeper = config.block_out_channels[0], config.block_out_channels[:2][-1]
    return branches * height * width * (deeper + 2 * first) * 4
