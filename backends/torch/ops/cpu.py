"""CPU settings that torch does not find by itself: threads, 16-bit instructions, the memory order of weights; and a
check that its norm lacks."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from itertools import accumulate
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from qwenimg.backends.torch.ops.attention import attention_order
from qwenimg.common.quant.rotated import MOST
from qwenimg.common.runtime.rates import SMALL

P = ParamSpec("P")
R = TypeVar("R")


class HasModel(Protocol):
    @property
    def model(self) -> torch.nn.Module: ...


C = TypeVar("C", bound=HasModel)


# Whether the results of models may be part of what is differentiated
_differentiable: ContextVar[bool] = ContextVar("differentiable", default=False)


def computes(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Wrap a component's method that runs its model: no gradients (but see `differentiable`), and one thread for a
    small model.

    An operation of a small model ends before a second thread has woken up for its half. On a busy machine every
    operation would then wait for the slowest thread, thousands of times in an image.
    """

    @wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with computing(is_small(self.model)):
            return method(self, *args, **kwargs)

    return run


@contextmanager
def differentiable() -> Iterator[None]:
    """Let models run with gradients where the caller has them, while the context is open."""
    token = _differentiable.set(True)
    try:
        yield
    finally:
        _differentiable.reset(token)


@contextmanager
def computing(small: bool) -> Iterator[None]:
    """Run models without gradients (but see `differentiable`) while the context is open, a `small` one on one
    thread."""
    with threads_for(small), nullcontext() if _differentiable.get() else torch.inference_mode(), attention_order():
        yield


@contextmanager
def threads_for(small: bool) -> Iterator[None]:
    """Compute a `small` model on one thread while the context is open."""
    threads = torch.get_num_threads()
    single = threads > 1 and small
    if single:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if single:
            torch.set_num_threads(threads)


def is_small(model: torch.nn.Module) -> bool:
    """Return whether the model has fewer than SMALL parameters.

    Counting stops at the limit, since every step asks this.
    """
    return all(count < SMALL for count in accumulate(p.numel() for p in model.parameters()))


def multiplies(dtype: torch.dtype, device: str) -> bool:
    """Return whether the device has instructions for products in `dtype`. Without them a CPU takes torch up to
    several times as long as for float32."""
    return _multiplies(dtype, device)


@cache
def _multiplies(dtype: torch.dtype, device: str) -> bool:
    if device != "cpu" or dtype in (torch.float32, torch.float64):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN says yes to any AVX-512, and then emulates bfloat16 in two to three times the time of float32
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    mkldnn = torch.ops.mkldnn
    return mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported()


def multiplies_int8(device: str) -> bool:
    """Return whether the device has instructions for products of 8-bit whole numbers. Without them oneDNN would lose
    sums that 16 bit do not hold, and torch's own loop takes one number at a time."""
    return _multiplies_int8(device)


@cache
def _multiplies_int8(device: str) -> bool:
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (7, 5)  # Turing
    if device != "cpu" or not torch.backends.mkldnn.is_available() or not torch.cpu._is_vnni_supported():
        return False
    largest = torch.full((32, 64), MOST, dtype=torch.int8)  # for oneDNN may be kept from instructions that are there
    return bool((torch._int_mm(largest, largest.t()) == 64 * MOST**2).all())


def laid_out(weight: Tensor, device: str) -> Tensor:
    """Return `weight` in the memory order that the device's instructions for its dtype take.

    Convolutions in 16 bit take channels last; they copy weights of another order at every call.
    """
    is_16_bit = weight.dtype in (torch.bfloat16, torch.float16)
    if weight.ndim == 4 and is_16_bit and multiplies(weight.dtype, device):
        return weight.contiguous(memory_format=torch.channels_last)
    return weight


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return torch's group norm. On a CPU it is checked: a deviation that overflows has the reciprocal 0, which would
    leave the biases alone as the result."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.group_norm(x, groups, weight, bias, eps)
    x = x.contiguous(memory_format=torch.channels_last if x.stride(1) == 1 else torch.contiguous_format)
    size = x.shape[0], x.shape[1], x[0, 0].numel()
    y, _, scale = torch.native_group_norm(x, weight, bias, *size, groups, eps)
    return y if (scale > 0).all() else y.fill_(torch.nan)
