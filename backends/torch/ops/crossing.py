"""Conversion of a block's arguments and results to numpy and back, for traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwenimg.backends.torch.ops import images
from qwenimg.backends.torch.ops.device import numpy
from qwenimg.backends.torch.ops.functions import DTYPES
from qwenimg.common.runtime.traced import Dtype, Tree, Values


def outward(value: Any, image: bool) -> Tree:
    """Return an argument or a result as numpy has it; a 4-D array of an `image` as [B C h w]."""
    if isinstance(value, (tuple, list)):
        return tuple(outward(part, image) for part in value)
    if isinstance(value, torch.dtype):
        return Dtype(str(value).rpartition(".")[2])
    if not isinstance(value, Tensor):
        return value
    shown = images.to_bchw(value) if image and value.ndim == 4 else value
    if value.dtype == torch.bool:
        return Values("bool", shown.cpu().numpy())
    if not value.dtype.is_floating_point:
        return Values("int64", shown.long().cpu().numpy())
    return Values(str(value.dtype).rpartition(".")[2], numpy(shown).copy())


def inward(tree: Tree, image: bool, device: torch.device, wide: torch.dtype | None) -> Any:
    """Return `tree`, made by `outward`, on the device. `wide`, if given, replaces the dtype of floating numbers."""
    if isinstance(tree, tuple):
        return tuple(inward(part, image, device, wide) for part in tree)
    if isinstance(tree, Dtype):
        return wide or DTYPES[tree.name]
    if not isinstance(tree, Values):
        return tree
    x = torch.tensor(tree.array).to(device)
    if tree.dtype in DTYPES:
        x = x.to(wide or DTYPES[tree.dtype])
    return images.from_bchw(x) if image and x.ndim == 4 else x
