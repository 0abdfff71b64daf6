"""What torch does not find out by itself about a CPU: threads, instructions for 16 bit, the order of weights."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from itertools import accumulate
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from qwenimg.backends.torch.ops.attention import attention_order

SMALL = 2**24  # parameters
P = ParamSpec("P")
R = TypeVar("R")


class HasModel(Protocol):
    @property
    def model(self) -> torch.nn.Module: ...


C = TypeVar("C", bound=HasModel)


def computes(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method of a component that runs its model: without gradients, and on one thread where the model is small.

    An operation of a small model is over before a second thread has woken up for its half. On a machine that does
    other work too, every operation then waits for the thread that comes last, thousands of times in a picture.
    """

    @wraps(method)
    def run(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with computing(_is_small(self.model)):
            return method(self, *args, **kwargs)

    return run


@contextmanager
def computing(small: bool) -> Iterator[None]:
    """Within it a model computes, a small one on one thread."""
    threads = torch.get_num_threads()
    alone = threads > 1 and small
    if alone:
        torch.set_num_threads(1)
    try:
        with torch.inference_mode(), attention_order():
            yield
    finally:
        if alone:
            torch.set_num_threads(threads)


def _is_small(model: torch.nn.Module) -> bool:
    """Stops counting where it is large, which is soon: this is asked at every step."""
    return all(count < SMALL for count in accumulate(p.numel() for p in model.parameters()))


def multiplies(dtype: torch.dtype, device: str) -> bool:
    """Whether the device has instructions for products in `dtype`. A CPU without them takes torch up to several times
    as long as for float32."""
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
    known = torch.ops.mkldnn
    return known._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported()


def laid_out(weight: Tensor, device: str) -> Tensor:
    """A weight in the order in memory that the instructions of a kind of device for its dtype take.

    Convolutions in 16 bit take channels last; of weights in another order they make a copy at every call.
    """
    sixteen = weight.dtype in (torch.bfloat16, torch.float16)
    if weight.ndim == 4 and sixteen and multiplies(weight.dtype, device):
        return weight.contiguous(memory_format=torch.channels_last)
    return weight
