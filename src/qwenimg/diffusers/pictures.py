"""Pictures as `output_type="np"` and "pt" have them, floats in 0..1: given as `image=`, they become 8 bits again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

NAMES = ("image", "mask_image", "control_image")


def in_8_bits(name: str, value: Any) -> Any:
    """Return a float array [H, W, C] or [N, H, W, C], or a tensor [C, H, W] or [N, C, H, W], as uint8 [H, W, C], or as
    a list of N > 1 of them; a mask has no C, or 1. A list has each in its place; any other value, such as a PIL image,
    is returned as it is. Raises UsageError."""
    if isinstance(value, list | tuple):
        several = [in_8_bits(name, one) for one in value]
        return several[0] if len(several) == 1 else several
    is_tensor = hasattr(value, "detach")
    if not is_tensor and not (isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)):
        return value
    try:
        values = np.asarray(value.detach().cpu().float() if is_tensor else value, np.float32)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{name} is {clean(value, 40)}; expected an array or a tensor") from None
    one = values.ndim < 4
    if values.ndim not in (2, 3, 4) or not values.size:
        raise UsageError(f"{name} has the shape {list(values.shape)}; give a picture [H, W, 3], or a tensor [3, H, W]")
    if is_tensor and values.ndim > 2:
        values = np.moveaxis(values, -3, -1)
    pixels = [_pixels(name, each) for each in (values[None] if one else values)]
    return pixels[0] if len(pixels) == 1 else pixels


def _pixels(name: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    least, most = float(values.min()), float(values.max())
    if not (least >= 0 and most <= 1):  # NaN too
        raise UsageError(f"{name} has values from {least:g} to {most:g}; floats of a picture are in 0 to 1")
    if name == "mask_image" and values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    return (values * np.float32(255)).round().astype(np.uint8)
