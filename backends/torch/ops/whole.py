"""Operations that a compiled block calls whole, since torch's compiler would not make them: a product that adds in
place, and one with GEGLU at its end. Importing this makes them known to torch as `torch.ops.qwenimg`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.functions import geglu

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder of what is compiled


@torch.library.custom_op(
    "qwenimg::accumulate", mutates_args=("made",), schema="(Tensor(a!) made, Tensor x, Tensor weight) -> ()"
)
def accumulate(made: Tensor, x: Tensor, weight: Tensor) -> None:
    """made [N C] += x [N in] weight [C in]^T."""
    made.addmm_(x, weight.t())


@torch.library.custom_op(
    "qwenimg::linear_geglu", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor"
)
def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [... in], weight [2C in] -> [... C]."""
    if x.device.type != "cuda":
        return geglu(F.linear(x, weight, bias))
    from qwenimg.backends.torch.ops import gated_product  # triton is there where a compiler for cards is

    return gated_product.linear_geglu(x, weight, bias)


@torch.library.register_fake("qwenimg::linear_geglu")
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))
