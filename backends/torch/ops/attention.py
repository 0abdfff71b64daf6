"""Attention, computed in chunks of queries where the scores of all pairs would take too much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.functions import DTYPES, at_least_float32
from qwenimg.common.precision.precision import Compute
from qwenimg.common.runtime.observers import seen

Shared: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
LEAST = 1e-15  # is added to the sum of weights of a linear attention
SCORE_BYTES = 2**28  # attention runs over chunks of queries whose scores take at most this much


@contextmanager
def attention_order() -> Iterator[None]:
    """Prefer cuDNN's attention on a Hopper card while the context is open, then flash attention.

    By others' measurements cuDNN is 1.7 to 2.3 times as fast there as flash attention 2, which is what torch has, and
    slower on Ampere; not measured here. Torch's own order puts cuDNN first only in some of its versions.
    """
    if not (torch.cuda.is_initialized() and _is_hopper()):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


@cache
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def attention_kernel(device: torch.device) -> str:
    """Return torch's name of the kernel that computes attention over heads of 128 in bfloat16."""
    from torch.nn.attention import SDPBackend

    q = torch.zeros(1, 1, 128, 128, dtype=torch.bfloat16, device=device)
    with attention_order():
        number = torch._fused_sdp_choice(q, q, q)
    return str(SDPBackend(number).name).lower().replace("_", " ")


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v for q [B L H D] and k, v [B S Hk D] -> [B L H*D], in v's dtype.

    Torch's kernels keep scores and softmax in float32. `mask` [B 1 1 S] is True where a key counts. `causal` queries
    are the last L of the S tokens, and see those before them, with a mask those that count. Fewer key heads than query
    heads are shared.
    """
    q, k, v = (x.to(v.dtype).transpose(1, 2) for x in (q, k, v))
    if causal and (mask is not None or q.shape[2] < k.shape[2]):  # torch would take them for the first L
        ones = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        before = ones.tril(k.shape[2] - q.shape[2])
        mask, causal = before if mask is None else before & mask, False
    shared = True if k.shape[1] != q.shape[1] else False  # noqa: SIM210 (a compiler takes no symbol for a bool)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
    return seen("attention", "", out.transpose(1, 2).flatten(-2))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention with ReLU kernels and no softmax, [B L H D] each -> [B L H*D] in v's dtype: the values weighed
    by relu(q) relu(k)^T, which is never made, since the sum of k^T v over all keys comes first (A. Katharopoulos et
    al., "Transformers are RNNs", 2020). All of it is float32."""
    return seen("linear_attention", "", linear_result(q, linear_sums(k, v), v.dtype))


def linear_sums(k: Tensor, v: Tensor) -> Tensor:
    """Return relu(k)^T v [B H D D+1] of keys and values [B L H D], in float32, with the sum of relu(k) last."""
    k, ones = F.relu(at_least_float32(k)), F.pad(at_least_float32(v), (0, 1), value=1.0)
    return k.permute(0, 2, 3, 1) @ ones.transpose(1, 2)


def linear_result(q: Tensor, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the linear attention [B L H*D] of queries [B L H D] by the `sums` over all keys, in `dtype`."""
    y = F.relu(at_least_float32(q)).transpose(1, 2) @ sums
    out = y[..., :-1] / (y[..., -1:] + LEAST)
    return out.to(dtype).transpose(1, 2).flatten(-2)


def score_bias(table: Tensor) -> Tensor:
    """Turn a number for each pair of positions and each head [S S H] into the bias of `biased_attention` [1 H S S], in
    float32."""
    return at_least_float32(table).permute(2, 0, 1)[None]


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q k^T + bias) v for q, k and v [B S H D] and bias [1 H S S] -> [B S H*D], in v's dtype.

    All of it is float32, since kernels take the bias in the dtype of q. Scores are not divided by sqrt(D).
    """
    q, k, wide = (at_least_float32(x).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, wide, attn_mask=bias, scale=1.0).to(v.dtype)
    return seen("attention", "", out.transpose(1, 2).flatten(-2))


class Attend(torch.nn.Module):
    """The dtype in which an attention computes, where it differs from the dtype of its values. Holds no weights."""

    path = ""
    compute: Compute | None = None
    shared: Shared | None = None  # computes an attention with other ranks

    def values(self, v: Tensor) -> Tensor:
        """Return the values as `attention` takes them: scaled, in the dtype in which it computes."""
        if self.compute is None:
            return v
        return (at_least_float32(v) * self.compute.scale).to(DTYPES[self.compute.dtype])

    def result(self, out: Tensor) -> Tensor:
        """Return the result of `attention` on such values, scaled back in float32."""
        return out if self.compute is None else at_least_float32(out) / self.compute.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, text_last: bool = False) -> Tensor:
        """Return `attention` on such values, scaled back in float32. text_last: the image's tokens come before the
        text's."""
        out = attention(q, k, v, mask) if self.shared is None else self.shared(q, k, v, mask, text_last)
        return self.result(out)


def spatial_attention(qkv: Tensor) -> Tensor:
    """Compute single-head attention over all pixels: [B 3C h w] -> [B C h w]."""
    B, _, h, w = qkv.shape
    # [B L C], channels last in memory: a condition of the kernels that keep no scores at all
    q, k, v = qkv.flatten(2).transpose(1, 2).contiguous().chunk(3, dim=-1)
    return single_head_attention(q, k, v).transpose(1, 2).reshape(B, -1, h, w)


def single_head_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention [B L C] each -> [B L C] in chunks of queries, so that memory never holds the scores of all
    pairs."""
    q, k, v = q[:, None], k[:, None], v[:, None]
    rows = max(1, SCORE_BYTES // (4 * k.shape[2]))
    parts = [F.scaled_dot_product_attention(chunk, k, v) for chunk in q.split(rows, dim=2)]
    return seen("attention", "", torch.cat(parts, dim=2)[:, 0])
