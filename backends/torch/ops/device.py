"""What crosses between numpy and the device, and when it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from qwenimg.backends.torch.ops.functions import at_least_float32

T = TypeVar("T")


def table(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that were made in numpy, float32 on the device, or float64 where that is the component's dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.from_numpy(values).to(device=device, dtype=wide)


def placed(values: np.ndarray | Sequence[Any], device: torch.device) -> Tensor:
    """Indices or truth values, as they are."""
    return torch.tensor(values, device=device)


def numpy(x: Tensor) -> np.ndarray:
    """float32, or float64 where that is what it is."""
    return at_least_float32(x).cpu().numpy()


def async_eval(x: Tensor) -> Tensor:
    """Nothing here; MLX hands what led to x to the device."""
    return x


def eval(x: T) -> T:
    """Nothing here; MLX evaluates, so that what led to x can be freed."""
    return x


def away(x: Tensor) -> Tensor:
    """A copy of x, which may be a part of a larger array, in the memory of the host."""
    return x.clone() if x.device.type == "cpu" else x.cpu()


def here(x: Tensor, like: Tensor) -> Tensor:
    """x where `like` is."""
    return x.to(like.device)
