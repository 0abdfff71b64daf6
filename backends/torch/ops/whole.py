"""An operation that a compiled block calls whole: a product that adds in place. Torch's compiler would replace it by
one that copies first. Importing this module registers it as `torch.ops.qwenimg.accumulate`."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op(
    "qwenimg::accumulate", mutates_args=("total",), schema="(Tensor(a!) total, Tensor x, Tensor weight) -> ()"
)
def accumulate(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add the product of x [N in] and weight [C in]^T to total [N C]."""
    total.addmm_(x, weight.t())
