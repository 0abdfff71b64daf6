"""Bytes and operations of a step of Qwen-Image, and of its modulation."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.qwen_dit import QwenDiTConfig
from qwenimg.common.networks.denoisers.qwen_patches import QwenPatchesConfig
from qwenimg.common.weights.plan import LoadPlan


def step_peak(config: QwenDiTConfig, branches: int, tokens: int) -> int:
    """Return the bytes of activations in one step with `branches` in one batch, of `tokens` image and text tokens each.

    Each token has two residuals, q, k and v in float32, and the feed-forward's four widths."""
    return branches * tokens * config.dim * 40


def reference_bytes(config: QwenDiTConfig, branches: int, seen: int, tokens: int) -> int:
    """Return the extra bytes of a step, on top of `step_peak`, if `seen` of the image `tokens` are of references: their
    first stream for each of `branches`; and with references at timestep 0, six vectors of modulation for each image
    token."""
    rows = 6 * tokens if config.zero_cond_t and seen else 0
    return (branches * seen + rows) * config.dim * 4


def patch_peak(width: int, tokens: int) -> int:
    """Return the bytes of activations in one block-wise patch of `tokens` image tokens: the stream, its norm, the
    picture's norm and their sum in float32, and two widths of its layers."""
    return tokens * width * 24


def patches_operations(config: QwenPatchesConfig, tokens: int) -> float:
    """Count the operations of all patches in one evaluation, for one branch of guidance."""
    return config.num_layers * 4.0 * tokens * config.dim**2


def modulation_rows(config: QwenDiTConfig, plan: LoadPlan, steps: int) -> int:
    """Return the bytes of a schedule's modulation: twelve vectors for each block and step. `plan` is the transformer's
    as it is in memory."""
    bias = plan.entries["transformer_blocks.0.img_mod.1.bias"]
    return 12 * config.dim * bias.storage.nbytes((1,)) * steps * config.num_layers


def step_operations(config: QwenDiTConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens` image and text tokens: for each token and block twelve
    squares of the width in linear layers, and attention to all tokens."""
    return config.num_layers * (24.0 * tokens * config.dim**2 + 4.0 * tokens**2 * config.dim)
