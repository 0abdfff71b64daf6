"""Transfer of arrays between numpy and the device, and the time at which they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch.ops.functions import at_least_float32

T = TypeVar("T")


def table(values: np.ndarray | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on the device, in float32, or in float64 if that is the component's `dtype`. They are made in
    numpy, or by another component in a training step."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return values.to(device=device, dtype=wide)


def placed(values: np.ndarray | Sequence[Any], device: torch.device) -> Tensor:
    """Return indices or truth values on the device, in their own dtype."""
    return torch.tensor(values, device=device)


def numpy(x: Tensor) -> np.ndarray:
    """Return x as a numpy array in float32, or in float64 if that is its dtype."""
    return at_least_float32(x).cpu().numpy()


def async_eval(x: Tensor) -> Tensor:
    """Return x. On MLX this starts the computation of x."""
    return x


def eval(x: T) -> T:
    """Return x. On MLX this evaluates x, so that its inputs can be freed."""
    return x


def away(x: Tensor) -> Tensor:
    """Return a copy of x, which may be part of a larger array, in the host's memory."""
    return x.clone() if x.device.type == "cpu" else x.cpu()


def contiguous(x: Tensor) -> Tensor:
    """Return x, copied if it is a part of a larger array, so that this can be freed."""
    return x.contiguous()


def here(x: Tensor, like: Tensor) -> Tensor:
    """Return x on the device of `like`."""
    return x.to(like.device)
