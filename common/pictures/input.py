"""Pictures that a user gives to start from, and masks: PNG, JPEG and WebP, read with care."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile, bad, open_regular
from qwenimg.common.base.text import clean
from qwenimg.common.pictures import blocks, input_pixels
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pictures.texts import format_of

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_FILE = 512 << 20  # bytes
# Looked at before anything is decoded. Pillow takes four bytes a pixel and the array three: 36 megapixels are 250 MB.
MAX_PIXELS = 36_000_000
MAX_SIDE = 32_768
# The decoders of these keep more than the pixels, in all about so many bytes for each.
DECODED_BYTES = {"WEBP": 19, "JPEG in several scans": 12}
MAX_DECODED = 7 * MAX_PIXELS


def read_image(path: Path) -> tuple[Uint8, list[str]]:
    """The picture at `path`, uint8 [H, W, 3], and a line for each way in which it was converted. Raises ModelError.

    It is turned as its EXIF says and brought to sRGB; what is transparent is laid on white."""
    return _read(path, input_pixels.rgb, lambda picture: None)


def read_mask(path: Path, like: Uint8) -> tuple[Uint8, list[str]]:
    """The mask at `path`, uint8 [H, W]: white is made anew, black is kept; and lines as for `read_image`. Raises
    ModelError unless it has the size of the picture `like`."""

    def check(picture: Image) -> None:
        height, width = like.shape[:2]
        found = input_pixels.upright_size(picture)
        if found != (width, height):
            size = f"{width}x{height}"
            raise bad(path, f"is {found[0]}x{found[1]}, the picture is {size}: make the mask of that size")

    return _read(path, input_pixels.grey, check)


def _read(
    path: Path, decode: Callable[[Image], tuple[Uint8, list[str]]], check: Callable[[Image], None]
) -> tuple[Uint8, list[str]]:
    """What `decode` makes of the picture at `path`, once its header has passed the limits and `check`."""
    from PIL import Image, UnidentifiedImageError

    with closing(open_regular(path)) as file:
        if file.size > MAX_FILE:
            raise bad(path, f"has {file.size / 1e6:,.0f} MB; pictures of at most {MAX_FILE / 1e6:,.0f} MB are read")
        several = _check_blocks(file)
        stream = io.BufferedReader(file.stream)  # it is closed with its last reference, and Pillow drops its own
        try:
            # The limit on pixels is ours, so Pillow's warning about large pictures says nothing new.
            with (
                warnings.catch_warnings(action="ignore"),
                Image.open(stream, formats=FORMATS) as picture,
            ):
                _check_size(path, picture, several)
                check(picture)
                pixels, notes = decode(picture)
                file.check_unchanged()
        except ModelError:
            raise
        except Image.DecompressionBombError:  # Pillow's own limit, which is higher, is looked at first
            raise bad(path, f"is too large: at most {MAX_PIXELS // 1_000_000} megapixels are read") from None
        except UnidentifiedImageError:
            raise bad(path, "is no PNG, JPEG or WebP picture; convert it to one of them") from None
        # Pillow's decoders raise whatever they raise; in every case the file is at fault.
        except Exception as error:
            raise bad(path, f"cannot be read as a PNG, JPEG or WebP picture: {clean(error, 80)}") from None
    return np.ascontiguousarray(pixels), [f"{clean(path.name, 60)}: {line}" for line in notes]


def _check_blocks(file: OpenFile) -> bool:
    """Whether it is a JPEG in several scans. Raises ModelError for too many blocks."""
    kind = format_of(file)
    if kind == "PNG":
        blocks.check_png(file, file.size)
    return kind == "JPEG" and blocks.check_jpeg(file)


def _check_size(path: Path, picture: Image, several: bool) -> None:
    several = several or "progressive" in picture.info
    kind = "JPEG in several scans" if several else picture.format or ""
    most = min(MAX_PIXELS, MAX_DECODED // DECODED_BYTES.get(kind, 7))
    width, height = picture.size
    if width * height > most or max(width, height) > MAX_SIDE:
        of = f" of a {kind.replace('WEBP', 'WebP')}" if kind in DECODED_BYTES else ""
        limit = f"at most {most // 1_000_000} megapixels{of} and {MAX_SIDE:,} a side are read; make it smaller"
        raise bad(path, f"is {width}x{height}; {limit}")
