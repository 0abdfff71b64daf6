"""Bytes and operations of a step of Flux.1, and of its modulation."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.flux_controlnet import FluxControlNetConfig
from qwenimg.common.networks.denoisers.flux_dit import FluxConfig
from qwenimg.common.weights.plan import LoadPlan


def step_peak(config: FluxConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` image and text tokens.

    Each token has two residuals, and in a block of one stream the feed-forward's four widths, twice as they are joined
    with those of the attention."""
    return tokens * config.dim * 48


def modulation_rows(config: FluxConfig, plan: LoadPlan, rows: int) -> int:
    """Return the bytes of `rows` rows of modulation: twelve vectors for each block of two streams, three for each
    block of one, and two for the head, which a ControlNet lacks. `plan` is the transformer's as it is in memory."""
    bias = plan.entries["transformer_blocks.0.norm1.linear.bias"]
    vectors = 12 * config.num_layers + 3 * config.num_single_layers + 2 * ("norm_out.linear.bias" in plan.entries)
    return rows * vectors * config.dim * bias.storage.nbytes((1,))


def step_operations(config: FluxConfig, tokens: int) -> float:
    """Count the operations of one prediction for `tokens` image and text tokens: for each token and block twelve
    squares of the width in linear layers, and attention to all tokens."""
    blocks = config.num_layers + config.num_single_layers
    return blocks * (24.0 * tokens * config.dim**2 + 4.0 * tokens**2 * config.dim)


def control_operations(config: FluxControlNetConfig, image: int, tokens: int) -> float:
    """Count the operations of one call of a ControlNet for `tokens` tokens, `image` of them the image's."""
    residuals = config.num_layers + config.num_single_layers
    return step_operations(config, tokens) + residuals * 2.0 * image * config.dim**2
