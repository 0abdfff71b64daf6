"""Causal attention of a language model, also within windows, with capped scores, and over the kept keys and values of
a text that is being written."""

from __future__ import annotations

import mlx.core as mx
from mlx.core import array as Array

from qwenimg.backends.mlx.ops.attention import has_kernel
from qwenimg.backends.mlx.ops.functions import at_least_float32
from qwenimg.common.networks.causal_form import PLAIN, CausalForm
from qwenimg.common.runtime.observers import seen

KEPT_BLOCK = 256  # tokens by which the memory of keys and values grows


class KeyValues:
    """The keys and values [1 H S D] of one text's tokens so far, in one attention."""

    keys: Array
    values: Array

    def __init__(self, *opening: Array) -> None:
        """Set the keys and values of the first tokens, if there are some. They are copied once more tokens come, into
        v's dtype, and never changed."""
        self.length = self.room = 0
        if opening:
            self.keys, self.values = opening
            self.length = self.room = self.keys.shape[2]

    def extend(self, k: Array, v: Array) -> None:
        """Append the next tokens' k and v [1 L H D], in v's dtype."""
        end = self.length + k.shape[1]
        if end > self.room:
            self._grow(k, v, -(-end // KEPT_BLOCK) * KEPT_BLOCK)
        self.keys[:, :, self.length : end] = k.astype(v.dtype).transpose(0, 2, 1, 3)
        self.values[:, :, self.length : end] = v.transpose(0, 2, 1, 3)
        self.length = end

    def _grow(self, k: Array, v: Array, room: int) -> None:
        keys = mx.zeros((1, k.shape[2], room, k.shape[3]), v.dtype)
        values = mx.zeros((1, v.shape[2], room, v.shape[3]), v.dtype)
        if self.length:
            keys[:, :, : self.length] = self.keys[:, :, : self.length]
            values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values, self.room = keys, values, room


def kept_attention(q: Array, kept: KeyValues, form: CausalForm = PLAIN) -> Array:
    """Return the attention [1 L H*D] of the last L tokens, q [1 L H D], to those of `kept`, of which they are the
    last."""
    return _causal(q, kept.keys[:, :, : kept.length], kept.values[:, :, : kept.length], form)


def causal_attention(q: Array, k: Array, v: Array, form: CausalForm) -> Array:
    """Return the attention [B L H*D] of q [B L H D] to k and v [B S Hk D], in v's dtype. The queries are the last L of
    the S tokens."""
    return _causal(q, k.astype(v.dtype).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), form)


def _causal(q: Array, k: Array, v: Array, form: CausalForm) -> Array:
    """Attend from q [B L H D] to k, v [B Hk S D]. A window leaves out the keys that no query sees."""
    L, D, dtype = q.shape[1], q.shape[3], v.dtype
    first = max(0, k.shape[2] - L + 1 - form.window) if form.window else 0
    k, v, q = k[:, :, first:], v[:, :, first:], q.astype(dtype).transpose(0, 2, 1, 3)
    scale = D**-0.5 if form.scale is None else form.scale
    if form.cap:
        out = _capped(q, k, v, scale, form)
    else:
        wide = (q, k, v) if has_kernel(v) else tuple(at_least_float32(x) for x in (q, k, v))
        mask = None if L == 1 else _mask(L, k.shape[2], form.window) if form.window else "causal"
        out = mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask)
    return seen("attention", "", out.astype(dtype).transpose(0, 2, 1, 3).flatten(2))


def _mask(queries: int, keys: int, window: int) -> Array:
    """Return which of the last `queries` tokens sees which of `keys` [L S]."""
    places = mx.arange(keys - queries, keys)[:, None], mx.arange(keys)[None]
    near = places[1] > places[0] - window if window else True
    return (places[1] <= places[0]) & near


def _capped(q: Array, k: Array, v: Array, scale: float, form: CausalForm) -> Array:
    """Attend from q [B H L D], with scores in float32 that tanh keeps within `cap`."""
    B, H, L, D = q.shape
    q, k, wide = (at_least_float32(x) for x in (q.reshape(B, k.shape[1], -1, D), k, v))
    scores = form.cap * mx.tanh(q @ k.swapaxes(-1, -2) * (scale / form.cap))
    scores = mx.where(_mask(L, k.shape[2], form.window), scores.reshape(B, H, L, -1), -mx.inf)
    weights = mx.softmax(scores, axis=-1).reshape(B, k.shape[1], -1, k.shape[2])
    return (weights @ wide).reshape(B, H, L, -1)
