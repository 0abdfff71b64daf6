"""The part of a picture that a mask gives: what is drawn of it, and the picture into which the result is put back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures import masks, pixels
from qwenimg.common.pictures.masks import Box
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.request.request import Request


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedArea:
    """The part of a request that is drawn, and the picture into which the result is put."""

    whole: Request
    drawn: Request  # its mask is ready to use; with `only_masked` its pictures are cut around the mask
    picture: Uint8 | None = None  # [H, W, C], into which the image is put; None: it is the result
    box: Box | None = None  # its place in there
    mask: Uint8 | None = None  # [H, W], how much of the image is seen

    def completed(self, drawn: Uint8) -> Uint8:
        """Return the result for an image [height, width, C] of `drawn`."""
        if self.picture is None or self.box is None or self.mask is None:
            return drawn
        return masks.put_back(self.picture, drawn, self.box, self.mask)


def split(request: Request, put_back: bool = False) -> MaskedArea:
    """Return what is drawn of `request`: with `only_masked` its pictures cut around the mask, and put back into the
    first. With `mask_blur` alone, or for a model that draws all anew (`put_back`), that picture is kept outside.
    Pictures that the model sees besides the first stay whole. Raises UsageError for a mask without any white."""
    if request.mask is None:
        return MaskedArea(whole=request, drawn=request)
    sharp = 255 - request.mask if request.mask_mode == "outside" else request.mask
    mask = masks.blurred(sharp, request.mask_blur)
    drawn = replace(request, mask=mask, mask_mode="inside", mask_blur=0.0, only_masked=None)
    picture, width, height = _first(request), request.width, request.height
    if request.only_masked is not None:
        box = masks.area(mask, request.only_masked, width, height)
        if box is None and request.mask_blur and masks.area(sharp, request.only_masked, width, height):
            raise UsageError(f"only-masked: mask-blur {request.mask_blur:g} leaves nothing of this mask; give less")
        if box is None:
            raise UsageError("only-masked: the mask has nothing to draw anew; white is what is drawn anew")
        return MaskedArea(whole=request, drawn=_cut(drawn, box), picture=picture, box=box, mask=mask)
    if not (request.mask_blur or put_back):
        return MaskedArea(whole=request, drawn=drawn)
    shown = np.clip(pixels.fit(mask, width, height).astype(np.int16) * 2, 0, 255).astype(np.uint8)
    picture = pixels.fit(picture, width, height)
    return MaskedArea(whole=request, drawn=drawn, picture=picture, box=Box(0, 0, width, height), mask=shown)


def _first(request: Request) -> Uint8:
    return request.control_pictures[0] if request.image is None else request.image


def _cut(request: Request, box: Box) -> Request:
    """Return a request with its first image, its mask and the pictures of its controls, which are taken to have the
    place of that image, cut to `box`; those that are seen apart from the image stay whole."""
    assert request.mask is not None
    (rows, columns), sides = request.mask.shape, (request.width, request.height)
    pairs = zip(request.controls, request.control_pictures, strict=True)
    pictures = [
        picture if one.whole else masks.cut(pixels.fit(picture, columns, rows), box, *sides) for one, picture in pairs
    ]
    return replace(
        request,
        image=None if request.image is None else masks.cut(request.image, box, *sides),
        mask=masks.cut(request.mask, box, *sides),
        controls=tuple(replace(one, picture=cut) for one, cut in zip(request.controls, pictures, strict=True)),
    )
