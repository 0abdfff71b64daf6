"""Conversion of a block's arguments and results to numpy and back, for traces."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from qwenimg.backends.mlx.ops import images
from qwenimg.backends.mlx.ops.device import numpy
from qwenimg.backends.mlx.ops.functions import DTYPES
from qwenimg.common.runtime.traced import Dtype, Tree, Values


def outward(value: Any, image: bool) -> Tree:
    """Return an argument or a result as numpy has it; a 4-D array of an `image` as [B C h w]."""
    if isinstance(value, (tuple, list)):
        return tuple(outward(part, image) for part in value)
    if isinstance(value, mx.Dtype):
        return Dtype(str(value).rpartition(".")[2])
    if not isinstance(value, mx.array):
        return value
    shown = images.to_bchw(value) if image and value.ndim == 4 else value
    if value.dtype == mx.bool_:
        return Values("bool", np.array(shown))
    if not mx.issubdtype(value.dtype, mx.floating):
        return Values("int64", np.array(shown.astype(mx.int64)))
    return Values(str(value.dtype).rpartition(".")[2], numpy(shown))


def inward(tree: Tree, image: bool, wide: bool) -> Any:
    """Return `tree`, made by `outward`, on the device; floating numbers as float32 where `wide`."""
    if isinstance(tree, tuple):
        return tuple(inward(part, image, wide) for part in tree)
    if isinstance(tree, Dtype):
        return mx.float32 if wide else DTYPES[tree.name]
    if not isinstance(tree, Values):
        return tree
    x = mx.array(tree.array)
    if tree.dtype in DTYPES:
        x = x.astype(mx.float32 if wide else DTYPES[tree.dtype])
    return images.from_bchw(x) if image and x.ndim == 4 else x
