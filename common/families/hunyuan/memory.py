"""Bytes and operations of a step of Hunyuan-DiT."""

from __future__ import annotations

from qwenimg.common.networks.denoisers.hunyuan_dit import HunyuanConfig


def step_peak(config: HunyuanConfig, tokens: int) -> int:
    """Return the bytes of activations in one step of `tokens` tokens.

    Each token has its residual, the norm of it, those that later blocks take, and the feed-forward's width, before and
    behind GELU."""
    skips = sum(map(config.gives_skip, range(config.num_layers)))
    return 4 * tokens * ((2 + skips) * config.dim + max(2 * config.inner, 6 * config.dim))


def step_operations(config: HunyuanConfig, tokens: int, text: int) -> float:
    """Count the operations of one prediction for `tokens`: for each token and block six squares of the width in the
    attentions and the feed-forward, one square of it for the time, two products for each of `text`, attention to all
    tokens and to the text, and two squares in the blocks that join a skip."""
    dim, blocks = config.dim, config.num_layers
    skips = sum(map(config.takes_skip, range(blocks)))
    products = tokens * (6 * dim**2 + 2 * dim * config.inner) + dim**2 + 2 * text * dim * config.cross_attention_dim
    return 2.0 * (blocks * products + skips * tokens * 2 * dim**2) + 4.0 * blocks * tokens * (tokens + text) * dim
