"""Manifests of layers that diffusion transformers share."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params


def vector_embedding(name: str, width: int, channels: int) -> Manifest:
    """Return the shapes of the two linear layers that embed a vector of `channels`."""
    return params.under(name, params.linear("linear_1", width, channels), params.linear("linear_2", width, width))


def joint_attention(name: str, width: int, head_dim: int) -> Manifest:
    """Return the shapes of attention over two streams, each with projections and norms of its own."""
    projections = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    return params.merge(
        *(params.under(name, params.linear(projection, width, width)) for projection in projections),
        *(params.under(name, params.norm(norm, head_dim)) for norm in norms),
    )


def feed_forward(name: str, width: int, hidden: int) -> Manifest:
    """Return the shapes of a feed-forward with `hidden` channels inside."""
    return params.under(name, params.linear("net.0.proj", hidden, width), params.linear("net.2", width, hidden))
