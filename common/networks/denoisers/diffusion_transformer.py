"""Manifests of layers that diffusion transformers share."""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params


def vector_embedding(
    name: str, width: int, channels: int, outputs: int | None = None, *, bias: bool = True
) -> Manifest:
    """Return the shapes of the two linear layers that embed a vector of `channels`. outputs: None: `width`."""
    first = params.linear("linear_1", width, channels, bias=bias)
    return params.under(name, first, params.linear("linear_2", outputs or width, width, bias=bias))


def attention(
    name: str,
    width: int,
    head_dim: int | None = None,
    *,
    bias: bool = True,
    seen: int | None = None,
    kv_dim: int | None = None,
) -> Manifest:
    """Return the shapes of attention from a stream. head_dim: of the norms of queries and keys, if it has these; seen:
    the width of the tokens that it sees; kv_dim: that of keys and values; None: `width`."""
    seen, kv_dim = seen or width, kv_dim or width
    shapes = {"to_q": (width, width), "to_k": (kv_dim, seen), "to_v": (kv_dim, seen), "to_out.0": (width, width)}
    return params.under(
        name,
        *(params.linear(layer, *shape, bias=bias) for layer, shape in shapes.items()),
        *(params.norm(norm, head_dim) for norm in ("norm_q", "norm_k") if head_dim),
    )


def joint_attention(name: str, width: int, head_dim: int | None = None, *, bias: bool = True) -> Manifest:
    """Return the shapes of attention over two streams, each with projections and norms of its own. head_dim: of the
    norms, if it has these."""
    projections = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    return params.under(
        name,
        *(params.linear(projection, width, width, bias=bias) for projection in projections),
        *(params.norm(norm, head_dim) for norm in norms if head_dim),
    )


def feed_forward(name: str, width: int, hidden: int, *, bias: bool = True) -> Manifest:
    """Return the shapes of a feed-forward with `hidden` channels inside."""
    first = params.linear("net.0.proj", hidden, width, bias=bias)
    return params.under(name, first, params.linear("net.2", width, hidden, bias=bias))
