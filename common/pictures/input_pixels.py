"""Conversion of any opened image to 8-bit RGB, RGBA or grey, with lines that describe it.

It runs strip by strip: a second copy of a large image, in Pillow's four bytes a pixel or in float64, would take more
memory than the image.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.text import clean
from qwenimg.common.pictures.pixels import HALF, ROWS, Uint8, fit

if TYPE_CHECKING:
    from PIL.Image import Image

SEVERAL = "has several pictures (an animation, pages, or views); the first is taken"
MAX_PROFILE = 4 << 20  # bytes
# Of a mask with transparency
OPAQUE = 250  # alpha from which on a pixel's colour counts
ALIKE = 32  # of 255: values that differ by no more are one colour, such as a brush's
TWO_TONES = 0.9  # the share of black and white from which on an image is no picture
_CLEAR = "paint white what is drawn anew, on black"
ORIENTATION = 0x0112  # EXIF's tag
_TURNED: dict[int, Callable[[Uint8], Uint8]] = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
_NAMES = {
    "1": "black and white", "L": "grey", "LA": "grey with transparency", "P": "of a palette", "PA": "of a palette",
    "CMYK": "CMYK", "YCCK": "CMYK", "YCbCr": "YCbCr", "LAB": "Lab",
}  # fmt: skip

Convert = Callable[["Image"], "Image"]


def srgb(picture: Image) -> tuple[Uint8, list[str]]:
    """Return the image as [H, W, 3] in sRGB, upright, and the lines; as [H, W, 4] if parts are transparent."""
    notes = _about(picture)
    sixteen = picture.mode.startswith("I")
    if not sixteen and picture.mode in _NAMES:
        notes.append(f"is {_NAMES[picture.mode]}, taken as RGB")
    elif sixteen:
        notes[:0] = ["is grey, taken as RGB"]
    to_srgb, line = _profile(picture)
    notes += [line] if line else []
    see_through = not sixteen and ("A" in picture.mode or "a" in picture.mode or "transparency" in picture.info)
    pixels = np.empty((picture.height, picture.width, 4 if see_through else 3), np.uint8)
    for top in range(0, picture.height, ROWS):
        strip = _eight_bits(_strip(picture, top))
        layer = strip.convert("RGBA") if see_through else strip
        pixels[top : top + ROWS, :, :3] = np.asarray(to_srgb(layer))
        if see_through:
            pixels[top : top + ROWS, :, 3] = np.asarray(layer.getchannel("A"))
    opaque = see_through and int(pixels[..., 3].min()) == 255
    return _upright(picture, pixels[..., :3] if opaque else pixels), notes


def mask(picture: Image) -> tuple[Uint8, list[str]]:
    """Return the mask that an image shows, [H, W], upright, and the lines: white is drawn anew. Without transparency it
    is the image in grey, its colour profile ignored. With it, what is opaque says which part is meant: paint of one
    colour is drawn anew; in a picture, or where black covers most, the hole is. Raises ModelError where it is not
    clear."""
    notes = _about(picture)
    if picture.mode not in ("1", "L") and not picture.mode.startswith("I"):
        notes.append("is taken as grey")
    shape = picture.height, picture.width
    pixels, alpha, seen = np.empty(shape, np.uint8), np.full(shape, 255, np.uint8), _Seen()
    for top in range(0, picture.height, ROWS):
        strip = _eight_bits(_strip(picture, top))
        if strip.mode in ("RGBA", "LA", "PA", "La", "RGBa", "P") or "transparency" in strip.info:
            layer = strip.convert("RGBA")
            alpha[top : top + ROWS] = np.asarray(layer.getchannel("A"))
            strip = layer.convert("RGB")
            seen.add(np.asarray(strip), alpha[top : top + ROWS])
        pixels[top : top + ROWS] = np.asarray(strip.convert("L"))
    if int(alpha.min()) < OPAQUE:
        pixels, line = seen.meant(alpha)
        notes = [*(note for note in notes if note != "is taken as grey"), line]
    return _upright(picture, pixels), notes


class _Seen:
    """The colours of the opaque pixels of a mask, strip by strip."""

    def __init__(self) -> None:
        self.count = self.pixels = self.light = self.dark = 0
        self.least, self.most = np.full(3, 255, np.uint8), np.zeros(3, np.uint8)

    def add(self, colours: Uint8, alpha: Uint8) -> None:
        opaque = colours[alpha >= OPAQUE]
        self.pixels += alpha.size
        if not len(opaque):
            return
        self.count += len(opaque)
        self.least, self.most = np.minimum(self.least, opaque.min(axis=0)), np.maximum(self.most, opaque.max(axis=0))
        self.light += int((opaque.min(axis=1) >= 255 - ALIKE).sum())
        self.dark += int((opaque.max(axis=1) <= ALIKE).sum())

    def meant(self, alpha: Uint8) -> tuple[Uint8, str]:
        """Return the mask and a line that says how it was read. Raises ModelError where it is not clear."""
        if not self.count:
            raise ModelError(f"is transparent all over, or in part: no opaque part shows what is meant; {_CLEAR}")
        one_colour = int((self.most.astype(int) - self.least).max()) <= ALIKE
        is_black, covers_most = int(self.most.max()) <= 2 * ALIKE, 2 * self.count > self.pixels
        if one_colour and (self.light == self.count or not (is_black or covers_most)):
            return alpha, "is paint on a transparent ground: the paint is drawn anew"
        if one_colour and is_black != covers_most:
            what = "black paint" if is_black else "paint of one colour over most of it"
            raise ModelError(f"is {what}, on a transparent ground: which of them is drawn anew is not clear; {_CLEAR}")
        if not one_colour and self.light and self.dark and self.light + self.dark > TWO_TONES * self.count:
            raise ModelError(f"has black, white and transparent parts: which are drawn anew is not clear; {_CLEAR}")
        return 255 - alpha, "has a transparent hole: the hole is drawn anew"


def transparent(picture: Image) -> tuple[Uint8, list[str]]:
    """Return 255 where the image is transparent and 0 where it is opaque, [H, W], upright, and the lines. Raises
    ModelError for an image without transparency."""
    if "A" not in picture.mode and "transparency" not in picture.info:
        raise ModelError("has no transparency: what is drawn anew must be transparent in it")
    pixels = np.empty((picture.height, picture.width), np.uint8)
    for top in range(0, picture.height, ROWS):
        pixels[top : top + ROWS] = 255 - np.asarray(_strip(picture, top).convert("RGBA").getchannel("A"))
    return _upright(picture, pixels), _about(picture)


def fitted(mask: Uint8, like: Uint8) -> tuple[Uint8, list[str]]:
    """Return `mask` [H, W] at the size of the image `like`, and lines if it was scaled, or is dark all over."""
    (rows, columns), (height, width) = mask.shape, like.shape[:2]
    same = (rows, columns) == (height, width)
    notes = [] if same else [f"is {columns}x{rows}, scaled to the {width}x{height} of the picture"]
    mask = fit(mask, width, height)
    if mask.max() < HALF:
        notes.append("is dark all over: nothing is drawn anew; white is what is drawn anew")
    return mask, notes


def _about(picture: Image) -> list[str]:
    """Return the lines that need no decoding."""
    frames = getattr(picture, "n_frames", 1)
    return [
        *(["has 16 bits a value, of which 8 are taken"] if _sixteen_bits(picture) else []),
        *([SEVERAL] if frames > 1 else []),
        *(["is turned upright, as its EXIF says"] if _orientation(picture) in _TURNED else []),
    ]


def _sixteen_bits(picture: Image) -> bool:
    """Return whether the file has 16 bits a value: Pillow reads colours as 8, and only the decoder's input shows it."""
    tile = getattr(picture, "tile", None)
    return picture.mode.startswith("I") or bool(tile and any(";16" in str(part[3]) for part in tile))


def _orientation(picture: Image) -> int:
    value = picture.getexif().get(ORIENTATION)
    return value if isinstance(value, int) else 1


def upright_size(picture: Image) -> tuple[int, int]:
    """Return the width and height of an image that is turned as its EXIF says."""
    width, height = picture.size
    return (height, width) if _orientation(picture) in (5, 6, 7, 8) else (width, height)


def _upright(picture: Image, pixels: Uint8) -> Uint8:
    turn = _TURNED.get(_orientation(picture))
    return pixels if turn is None else turn(pixels)


def _strip(picture: Image, top: int) -> Image:
    return picture.crop((0, top, picture.width, min(picture.height, top + ROWS)))


def _eight_bits(strip: Image) -> Image:
    """Scale values of 16 or 32 bits to 8: Pillow's own conversion would clip them."""
    from PIL import Image

    if not strip.mode.startswith("I"):
        return strip
    values = np.asarray(strip).astype(np.float64)
    return Image.fromarray(np.rint(values / 65535 * 255).clip(0, 255).astype(np.uint8))


def _profile(picture: Image) -> tuple[Convert, str | None]:
    """Return a function that converts a strip by the image's ICC profile to sRGB, and a line about it, or None."""
    raw = picture.info.get("icc_profile")
    if not raw:
        return _plain, None
    if len(raw) > MAX_PROFILE:
        return _plain, "has a colour profile that is too large and is not used"
    from PIL import ImageCms

    mode = "CMYK" if picture.mode == "CMYK" else "L" if picture.mode[0] in "1LI" else "RGB"
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(raw))
        name = ImageCms.getProfileDescription(profile).strip()
        if mode == "RGB" and "srgb" in name.lower():
            return _plain, None
        transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return _plain, "has a colour profile that cannot be used; taken as sRGB"

    def to_srgb(strip: Image) -> Image:
        converted = ImageCms.applyTransform(strip if strip.mode == mode else strip.convert(mode), transform)
        assert converted is not None
        return converted

    return to_srgb, f"is converted from its colour profile ({clean(name, 40)}) to sRGB"


def _plain(strip: Image) -> Image:
    return strip.convert("RGB")
