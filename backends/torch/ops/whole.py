"""An operation that a compiled block calls as it is: a product that adds in place, which torch's compiler would replace
by one that copies first. Importing this registers it as `torch.ops.qwenimg.accumulate`."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op(
    "qwenimg::accumulate", mutates_args=("made",), schema="(Tensor(a!) made, Tensor x, Tensor weight) -> ()"
)
def accumulate(made: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add the product of x [N in] and weight [C in]^T to made [N C]."""
    made.addmm_(x, weight.t())
