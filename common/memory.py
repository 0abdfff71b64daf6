"""Predictions of memory from configurations alone, and what the system has free."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

from qwenimg.common.checkpoint import LoadPlan
from qwenimg.common.models.qwen_dit import QwenDiTConfig
from qwenimg.common.models.qwen_vae import QwenVAEConfig, halo
from qwenimg.common.precision import BYTES, Precision

DECODE_BUFFERS = 5  # images of the widest level that are alive at once: input, upsampled, normed, convolved, columns


def free_ram() -> int:
    """Bytes that the system could still give to a process."""
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def weight_bytes(plan: LoadPlan, precision: Precision, component: str) -> int:
    """Bytes of the weights in `plan` once they are loaded in the policy's dtypes."""
    return sum(prod(e.shape) * BYTES[precision.weight_dtype(component, n)] for n, e in plan.entries.items())


def step_peak(config: QwenDiTConfig, branches: int, tokens: int) -> int:
    """Bytes of activations in one step with so many branches in one batch, of `tokens` image and text tokens each.

    Per token: two streams' worth of float32 residual, q, k and v in float32, and the feed-forward's four widths.
    """
    return branches * tokens * config.dim * 40


def decode_peak(config: QwenVAEConfig, height: int, width: int, itemsize: int) -> int:
    """Bytes that decoding latents of height x width takes at its peak, weights aside."""
    widest = 0
    for level, (inputs, outputs, upsampled) in enumerate(config.up_blocks):
        pixels = height * width * 4**level
        widest = max(widest, pixels * max(inputs, outputs) * (4 if upsampled else 1))
    return DECODE_BUFFERS * widest * itemsize


def decode_tile(config: QwenVAEConfig, height: int, width: int, itemsize: int, free: int) -> int | None:
    """The largest tile side, in latents, whose predicted peak is within half of `free`; None if no tile is needed."""
    if decode_peak(config, height, width, itemsize) <= free // 2:
        return None
    margin = 2 * halo(config)
    side = max(height, width)
    while side > 16 and decode_peak(config, side + margin, side + margin, itemsize) > free // 2:
        side = max(16, side * 3 // 4)
    return side
