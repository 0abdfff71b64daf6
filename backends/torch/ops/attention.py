"""Attention, in chunks of queries where the scores of all pairs would take too much memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.functions import DTYPES, at_least_float32
from qwenimg.common.runtime.observers import seen
from qwenimg.common.weights.precision import Compute

SCORE_BYTES = 2**28  # attention runs over chunks of queries whose scores take at most this much


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for q [B L H D] and k, v [B S Hk D] -> [B L H*D] in v's dtype.

    torch's kernels keep scores and softmax in float32. `mask` [B 1 1 S] is True where a key counts. Fewer key heads
    than query heads are shared.
    """
    q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
    shared = k.shape[1] != q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    return seen("attention", "", out.transpose(1, 2).flatten(-2))


class Attend(torch.nn.Module):
    """What an attention computes in, where that is another dtype than its values': no weights."""

    path = ""
    compute: Compute | None = None

    def values(self, v: Tensor) -> Tensor:
        """As `attention` is to take them, in the dtype that it then computes in."""
        if self.compute is None:
            return v
        return (at_least_float32(v) * self.compute.scale).to(DTYPES[self.compute.dtype])

    def result(self, out: Tensor) -> Tensor:
        """What `attention` made of such values, scaled back in float32."""
        return out if self.compute is None else at_least_float32(out) / self.compute.scale


def spatial_attention(qkv: Tensor) -> Tensor:
    """Single-head attention over all pixels: [B 3C h w] -> [B C h w]."""
    B, _, h, w = qkv.shape
    # [B L C], channels last in memory: a condition of the kernels that keep no scores at all
    q, k, v = qkv.flatten(2).transpose(1, 2).contiguous().chunk(3, dim=-1)
    return single_head_attention(q, k, v).transpose(1, 2).reshape(B, -1, h, w)


def single_head_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B L C] each -> [B L C], in chunks of queries so that the scores of all pairs are never in memory."""
    q, k, v = q[:, None], k[:, None], v[:, None]
    rows = max(1, SCORE_BYTES // (4 * k.shape[2]))
    parts = [F.scaled_dot_product_attention(chunk, k, v) for chunk in q.split(rows, dim=2)]
    return seen("attention", "", torch.cat(parts, dim=2)[:, 0])
