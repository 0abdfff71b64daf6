"""A picture on a larger canvas: its borders continued outwards, and a mask of what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.request import outpaint_text

BLUR = 8.0  # standard deviation, in pixels, of the edge between what is new and the picture, unless it is given
STRENGTH = 1.0  # the canvas beyond the picture is nothing to keep


def on_canvas(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call with its first picture on the canvas of `outpaint`, and the mask for it. Raises
    UsageError."""
    borders = values.get("outpaint") or ()
    if not borders:
        return dict(values)
    image = values.get("image")
    first, *more = image if isinstance(image, (tuple, list)) else (image,)
    if not isinstance(first, np.ndarray) or first.ndim != 3:
        raise UsageError("outpaint needs the picture that it extends: give it with -i")
    for name, why in (("mask", "its own mask"), ("only_masked", "all of the canvas")):
        if values.get(name) is not None:
            raise UsageError(f"outpaint makes {why}; leave out {name.replace('_', '-')}")
    if values.get("hires") is not None:
        raise UsageError("outpaint keeps the picture as it is, and hires draws it anew; draw with one, then the other")
    canvas, mask = extended(first, borders)
    usual: dict[str, Any] = {"mask_blur": BLUR, "strength": STRENGTH}
    usual |= outpaint_text.sides(values, (first,))
    return usual | dict(values) | {"image": (canvas, *more) if more else canvas, "mask": mask}


def extended(picture: Uint8, borders: tuple[outpaint_text.Border, ...]) -> tuple[Uint8, Uint8]:
    """Return a picture [H, W, C] with its edges repeated beyond it, and the mask [h, w], 255 there. Raises
    UsageError."""
    rows, columns = picture.shape[:2]
    outpaint_text.extended(rows, columns, borders)
    left, right, top, bottom = outpaint_text.pixels(borders)
    sides = (top, bottom), (left, right)
    mask = np.pad(np.zeros((rows, columns), np.uint8), sides, constant_values=255)
    return np.pad(picture, (*sides, (0, 0)), mode="edge"), mask
