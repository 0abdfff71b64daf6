"""Attention on the pretend accelerator as a card's kernels compute it: no scores are kept for the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from support.pretend_device import Shell

aten = torch.ops.aten


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Tensor:
        made = aten._scaled_dot_product_flash_attention_for_cpu(q.inner, k.inner, v.inner)
        out, logsumexp = map(Shell, made)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, k, v, out, logsumexp = (x.inner for x in ctx.saved_tensors)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(map(Shell, backward(gradients[0].inner, q, k, v, out, logsumexp, 0.0, False)))


@contextmanager
def flash_attention() -> Iterator[None]:
    """Let attention without a mask that has gradients be computed so."""
    plain = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        usual = any(options.get(name) is not None for name in ("attn_mask", "scale")) or options.get("is_causal")
        fits = isinstance(q, Shell) and torch.is_grad_enabled() and not usual
        return _Flash.apply(q, k, v) if fits else plain(q, k, v, **options)  # type: ignore[no-untyped-call]

    with patch.object(F, "scaled_dot_product_attention", attention):
        yield
