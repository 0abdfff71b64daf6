"""Bytes and operations of a step of Stable Diffusion 3."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.sd3_dit import SD3Config, chunks
from qwenimg.common.weights.plan import LoadPlan


def step_peak(config: SD3Config, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens.

    Each token has two residuals, q, k and v in float32, and the feed-forward's four widths."""
    return tokens * config.dim * 40


def modulation_rows(config: SD3Config, plan: LoadPlan, rows: int) -> int:
    """Return the bytes of a modulation of `rows` rows, a timestep of a prompt each: six vectors for each stream of each
    block, and three more for a second attention. `plan` is the transformer's as it is in memory."""
    bias = plan.entries["transformer_blocks.0.norm1.linear.bias"]
    vectors = sum(sum(chunks(config, layer)) for layer in range(config.num_layers)) + 2
    return vectors * config.dim * bias.storage.nbytes((1,)) * rows


def step_operations(config: SD3Config, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens` image tokens and `text` text tokens: for each token and block
    twelve squares of the width in linear layers, and attention to all tokens; in a second attention, four squares and
    attention to image tokens."""
    dim, both = config.dim, tokens + text
    joint = 24.0 * both * dim**2 + 4.0 * both**2 * dim
    second = 8.0 * tokens * dim**2 + 4.0 * tokens**2 * dim
    return config.num_layers * joint + len(config.dual_attention_layers) * second
