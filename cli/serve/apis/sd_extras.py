"""The fields of AUTOMATIC1111's routes extra-single-image and extra-batch-images: pictures made larger.

Its own names and defaults are those of `ExtrasBaseRequest` in version 1.10.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qwenimg.cli.serve.apis import body
from qwenimg.cli.serve.http_error import HttpError
from qwenimg.cli.serve.settings import Settings
from qwenimg.cli.workers.messages import Enlarging
from qwenimg.common.base.text import clean
from qwenimg.common.numbers.sizes import MAX_SIDE
from qwenimg.common.request import names

MOST = 8.0  # times, as there
# Fields with the values that ask for nothing.
NOTHING: Mapping[str, tuple[Any, ...]] = {
    "gfpgan_visibility": (0,),
    "codeformer_visibility": (0,),
    "extras_upscaler_2_visibility": (0,),
    "upscaling_max_side_length": (0,),
}


def enlarging(data: Mapping[str, Any], settings: Settings) -> Enlarging | None:
    """Return how a picture is made larger; None without an upscaler, which leaves it as it is."""
    for name, values in NOTHING.items():
        if data.get(name, 0) not in values:
            raise HttpError(400, f"{name} is not supported here; leave it out", param=name, code="unsupported")
    crops = data.get("upscaling_crop", True)
    if crops not in (0, 1):
        raise HttpError(400, "upscaling_crop is not true or false", param="upscaling_crop")
    mode = body.number(data.get("resize_mode", 0), int)
    if mode not in (0, 1) or isinstance(mode, bool):
        raise HttpError(400, "resize_mode is 0, by upscaling_resize, or 1, to a width and height", param="resize_mode")
    by = _number(data, "upscaling_resize", 2, 1, MOST) if mode == 0 else 0.0
    sides = [int(_number(data, f"upscaling_resize_{side}", 512, 1, MAX_SIDE)) for side in "wh"] if mode else [0, 0]
    upscaler = _upscaler(data.get("upscaler_1", "None"), settings)
    if upscaler is None:
        return None
    return Enlarging(upscaler=upscaler, by=by, size=(sides[0], sides[1]), crops=bool(crops), seconds=settings.deadline)


def _upscaler(name: object, settings: Settings) -> str | None:
    if not isinstance(name, str):
        raise HttpError(400, "upscaler_1 is not the name of an upscaler", param="upscaler_1")
    if name in ("", "None"):
        return None
    if (ours := names.ENLARGERS_THERE.get(name)) is not None:
        if ours.startswith(names.LATENT):
            raise HttpError(400, f"{clean(name, 40)} enlarges latents, and this is a picture", param="upscaler_1")
        return ours
    return body.upscaler_named(names.UPSCALERS_THERE.get(name, name), settings, "upscaler_1")


def _number(data: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.number(data.get(name, default), float)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise HttpError(400, f"{name} is not a number from {least:g} to {most:g}", param=name)
    return float(value) if math.isfinite(value) else 0.0
