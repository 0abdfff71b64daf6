"""Bytes and operations of a step of AuraFlow."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.aura_dit import AuraConfig
from qwenimg.common.weights.plan import LoadPlan


def step_peak(config: AuraConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens.

    Each token has two residuals, the input of the feed-forward and the residual with the attention's result, and the
    feed-forward's values and gate."""
    return tokens * (16 * config.dim + 8 * config.hidden)


def modulation_rows(config: AuraConfig, plan: LoadPlan, rows: int) -> int:
    """Return the bytes of `rows` rows of modulation: twelve vectors for each block of two streams, six for each block
    of one, and two for the head. `plan` is the transformer's as it is in memory."""
    bias = plan.entries["time_step_proj.linear_1.bias"]
    vectors = 12 * config.num_mmdit_layers + 6 * config.num_single_dit_layers + 2
    return rows * vectors * config.dim * bias.storage.nbytes((1,))


def step_operations(config: AuraConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens` image and text tokens: for each token and block four squares
    of the width in attention, the feed-forward's three layers, and attention to all tokens."""
    products = config.dim * (4 * config.dim + 3 * config.hidden)
    blocks = config.num_mmdit_layers + config.num_single_dit_layers
    return blocks * (2.0 * tokens * products + 4.0 * tokens**2 * config.dim)
