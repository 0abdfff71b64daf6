"""The pictures that FLUX.3 sees besides the text, in sizes that its VAE takes: one alone is kept whole and mirrored at
its edges, of several the middle is seen."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.base.errors import UsageError
from qwenimg.common.numbers.sizes import ceil_to, render_size
from qwenimg.common.pictures import pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pipeline.models.inputs import References, Size
from qwenimg.common.request.request import MULTIPLE, Request

MOST = 10  # references, by the model's card
LARGEST, LARGEST_OF_SEVERAL = 4 * 1024**2, 1024**2  # pixels; a larger picture is made smaller
LEAST_SIDE, LARGEST_SIDE = 64, 4096  # of the canvas of one picture


def canvas(width: int, height: int) -> tuple[Size, Size]:
    """Return the size to which a picture of width x height is scaled, and that of the canvas in whose middle it is, as
    diffusers has them."""
    scale = min(1.0, sqrt(LARGEST / (width * height)), LARGEST_SIDE / max(width, height))
    while True:
        inner = max(1, round(width * scale)), max(1, round(height * scale))
        columns, rows = (min(LARGEST_SIDE, max(LEAST_SIDE, ceil_to(side, MULTIPLE))) for side in inner)
        if columns * rows <= LARGEST:
            return inner, (columns, rows)
        scale *= 0.995


def fitted(width: int, height: int) -> Size:
    """Return the size of an image that is as large as a picture of width x height, within what the model draws."""
    return canvas(width, height)[0]


def middle(width: int, height: int) -> tuple[Size, Size]:
    """Return the size to which one of several pictures is scaled, and that of its middle that is seen. Raises
    UsageError for a picture that is too narrow."""
    scale = sqrt(LARGEST_OF_SEVERAL / (width * height))
    inner = (width, height) if scale >= 1 else (int(width * scale), int(height * scale))
    columns, rows = (side // MULTIPLE * MULTIPLE for side in inner)
    if not columns or not rows:
        raise UsageError(f"a picture of {width}x{height} is too narrow: give {MULTIPLE} pixels or more a side")
    return inner, (columns, rows)


def sizes(request: Request) -> list[Size]:
    """Return the size in which the model sees each picture of `request`. Raises UsageError."""
    sized = canvas if len(request.images) == 1 else middle
    return [sized(*picture.shape[1::-1])[1] for picture in request.images]


def values(request: Request) -> list[NDArray[np.float32]]:
    """Return each picture of `request` as the model sees it, as [1, 3, h, w] in -1..1."""
    seen = mirrored if len(request.images) == 1 else cropped
    return [pixels.from_uint8(seen(picture)) for picture in request.images]


def mirrored(picture: Uint8) -> Uint8:
    """Return a picture [H, W, 3] in the middle of its canvas, mirrored at its edges."""
    (width, height), (columns, rows) = canvas(*picture.shape[1::-1])
    left, top = (columns - width) // 2, (rows - height) // 2
    edges = ((top, rows - height - top), (left, columns - width - left), (0, 0))
    mode = "reflect" if min(width, height) > MULTIPLE else "symmetric"
    return np.pad(pixels.fit(picture, width, height), edges, mode=mode)  # type: ignore[call-overload,no-any-return]


def cropped(picture: Uint8) -> Uint8:
    """Return the middle of a picture [H, W, 3]."""
    (width, height), (columns, rows) = middle(*picture.shape[1::-1])
    left, top = (width - columns) // 2, (height - rows) // 2
    return pixels.fit(picture, width, height)[top : top + rows, left : left + columns]


def origin(request: Request) -> tuple[int, int]:
    """Return the left and top of an image that is as large as its reference: those of this in its canvas. An image that
    also starts from the picture has it in the corner."""
    if len(request.images) != 1 or not request.starts_from_noise:
        return 0, 0
    size, (columns, rows) = canvas(*request.images[0].shape[1::-1])
    drawn = render_size(request.width, request.height, MULTIPLE)
    if size != (request.width, request.height) or drawn != (columns, rows):
        return 0, 0
    return (columns - size[0]) // 2, (rows - size[1]) // 2


REFERENCES = References(sizes=sizes, values=values)
