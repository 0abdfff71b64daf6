"""Causal attention of a language model, also within windows, with capped scores, and over the kept keys and values of
a text that is being written."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.functions import at_least_float32
from qwenimg.common.networks.causal_form import PLAIN, CausalForm
from qwenimg.common.runtime.observers import seen

KEPT_BLOCK = 256  # tokens by which the memory of keys and values grows


class KeyValues:
    """The keys and values [1 H S D] of one text's tokens so far, in one attention."""

    keys: Tensor
    values: Tensor

    def __init__(self, *opening: Tensor) -> None:
        """Set the keys and values of the first tokens, if there are some. They are copied once more tokens come, into
        v's dtype, and never changed."""
        self.length = self.room = 0
        if opening:
            self.keys, self.values = opening
            self.length = self.room = self.keys.shape[2]

    def extend(self, k: Tensor, v: Tensor) -> None:
        """Append the next tokens' k and v [1 L H D], in v's dtype."""
        end = self.length + k.shape[1]
        if end > self.room:
            self._grow(k, v, -(-end // KEPT_BLOCK) * KEPT_BLOCK)
        self.keys[:, :, self.length : end] = k.transpose(1, 2)
        self.values[:, :, self.length : end] = v.transpose(1, 2)
        self.length = end

    def _grow(self, k: Tensor, v: Tensor, room: int) -> None:
        keys = v.new_zeros(1, k.shape[2], room, k.shape[3])
        values = v.new_zeros(1, v.shape[2], room, v.shape[3])
        if self.length:
            keys[:, :, : self.length] = self.keys[:, :, : self.length]
            values[:, :, : self.length] = self.values[:, :, : self.length]
        self.keys, self.values, self.room = keys, values, room


def kept_attention(q: Tensor, kept: KeyValues, form: CausalForm = PLAIN) -> Tensor:
    """Return the attention [1 L H*D] of the last L tokens, q [1 L H D], to those of `kept`, of which they are the
    last."""
    return _causal(q, kept.keys[:, :, : kept.length], kept.values[:, :, : kept.length], form)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, form: CausalForm) -> Tensor:
    """Return the attention [B L H*D] of q [B L H D] to k and v [B S Hk D], in v's dtype. The queries are the last L of
    the S tokens."""
    return _causal(q, k.to(v.dtype).transpose(1, 2), v.transpose(1, 2), form)


def _causal(q: Tensor, k: Tensor, v: Tensor, form: CausalForm) -> Tensor:
    """Attend from q [B L H D] to k, v [B Hk S D]. A window leaves out the keys that no query sees."""
    B, L, H, D = q.shape
    first = max(0, k.shape[2] - L + 1 - form.window) if form.window else 0
    k, v, q = k[:, :, first:], v[:, :, first:], q.to(v.dtype)
    if form.cap:
        out = _capped(q.transpose(1, 2), k, v, form)
    elif L == 1:  # the heads that share keys are queries of one head: no copy of the keys
        shared = q.reshape(B, k.shape[1], H // k.shape[1], D)
        out = F.scaled_dot_product_attention(shared, k, v, scale=form.scale).reshape(B, H, 1, -1)
    else:
        alone = k.shape[2] == L and not form.window
        mask = None if alone else _mask(L, k.shape[2], form.window, q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=alone, scale=form.scale, enable_gqa=k.shape[1] != H
        )
    return seen("attention", "", out.transpose(1, 2).flatten(-2))


def _mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Return which of the last `queries` tokens sees which of `keys` [L S]."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return ones.triu(keys - queries - window + 1) if window else ones


def _capped(q: Tensor, k: Tensor, v: Tensor, form: CausalForm) -> Tensor:
    """Attend from q [B H L D], with scores in float32 that tanh keeps within `cap`."""
    B, H, L, D = q.shape
    q, k, wide = (at_least_float32(x) for x in (q.reshape(B, k.shape[1], -1, D), k, v))
    scores = q @ k.transpose(-1, -2) * (D**-0.5 if form.scale is None else form.scale)
    scores = (form.cap * torch.tanh(scores / form.cap)).reshape(B, H, L, -1)
    scores = scores.masked_fill(~_mask(L, k.shape[2], form.window, q.device), -torch.inf)
    weights = torch.softmax(scores, dim=-1).reshape(B, k.shape[1], -1, k.shape[2])
    return (weights @ wide).reshape(B, H, L, -1).to(v.dtype)
