"""Reading of initial images and masks from PNG, JPEG, WebP, BMP, GIF and TIFF files of unknown origin."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import OpenFile, bad, open_source
from qwenimg.common.base.text import clean
from qwenimg.common.pictures import input_pixels
from qwenimg.common.pictures.containers import blocks, gif, tiff
from qwenimg.common.pictures.pixels import Uint8
from qwenimg.common.pictures.texts import format_of

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

_READ = "PNG, JPEG, WebP, BMP, GIF or TIFF picture"
_HEIF = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif")
MAX_FILE = 512 << 20  # bytes
# Checked before anything is decoded. Pillow and the array take four bytes a pixel each: 36 megapixels are 290 MB.
MAX_PIXELS = 36_000_000
MAX_SIDE = 32_768
# Bytes per pixel of decoders that keep more than the pixels.
DECODED_BYTES = {"WEBP": 19, "JPEG in several scans": 12, "TIFF": 21}
MAX_DECODED = 7 * MAX_PIXELS


def read_image(source: Path | OpenFile) -> tuple[Uint8, list[str]]:
    """Read the image at a path, or in an open file, as uint8 [H, W, 3], or [H, W, 4] if parts are transparent, with a
    line for each conversion. Closes the file. Raises ModelError.

    It is turned as its EXIF says and converted to sRGB."""
    pixels, lines = _read(source, input_pixels.srgb)
    return np.ascontiguousarray(pixels), lines


def read_size(source: Path | OpenFile) -> tuple[int, int]:
    """Return the width and height of the image at a path, or in an open file, as they are stored. No pixel is decoded.
    Closes the file. Raises ModelError."""
    size, _ = _read(source, lambda picture: (picture.size, []))
    return size


def read_upright_size(source: Path | OpenFile) -> tuple[int, int]:
    """Return the width and height of an image as `read_image` gives it: turned as its EXIF says. No pixel is decoded.
    Closes the file. Raises ModelError."""
    size, _ = _read(source, lambda picture: (input_pixels.upright_size(picture), []))
    return size


def read_mask(source: Path | OpenFile, like: Uint8, *, transparent: bool = False) -> tuple[Uint8, list[str]]:
    """Read the mask at a path, or in an open file, as uint8 [H, W], at the size of the image `like`, with lines as from
    `read_image`. White is regenerated, black is kept, and transparency is read as `input_pixels.mask` says; with
    `transparent` it is the transparent parts that are regenerated, whatever their colour. Raises ModelError."""
    path = source if isinstance(source, Path) else source.path

    def decode(picture: Image) -> tuple[Uint8, list[str]]:
        try:
            mask, notes = (input_pixels.transparent if transparent else input_pixels.mask)(picture)
        except ModelError as error:
            raise bad(path, str(error)) from None
        mask, more = input_pixels.fitted(mask, like)
        return mask, notes + more

    mask, lines = _read(source, decode)
    return np.ascontiguousarray(mask), lines


def check_bytes(file: OpenFile) -> None:
    """Raise ModelError for a file that is larger than any picture."""
    if file.size > MAX_FILE:
        raise bad(file.path, f"has {file.size / 1e6:,.0f} MB; pictures of at most {MAX_FILE / 1e6:,.0f} MB are read")


def _read(source: Path | OpenFile, decode: Callable[[Image], tuple[Result, list[str]]]) -> tuple[Result, list[str]]:
    """Return the result of `decode` for the image of `source`, once its header has passed the limits."""
    from PIL import Image, UnidentifiedImageError

    with closing(open_source(source)) as file:
        path = file.path
        check_bytes(file)
        kind = format_of(file)
        if kind is None:
            raise bad(path, f"is no {_READ}; {_what_else(file)}")
        try:
            stream, several, frames = _stream(file, kind)
            # The limit on pixels is ours, so Pillow's warning about large pictures says nothing new.
            with (
                warnings.catch_warnings(action="ignore"),
                Image.open(stream, formats=(kind,)) as picture,
            ):
                _check_size(path, picture, several)
                result, notes = decode(picture)
                notes = [*([input_pixels.SEVERAL] if frames else []), *notes]
                file.check_unchanged()
        except ModelError:
            raise
        except Image.DecompressionBombError:  # Pillow's own limit, which is higher, is looked at first
            raise bad(path, f"is too large: at most {MAX_PIXELS // 1_000_000} megapixels are read") from None
        except UnidentifiedImageError:
            raise bad(path, f"cannot be read as a {_READ}: its header is broken") from None
        # Pillow's decoders raise errors of many types; in every case the file is at fault.
        except Exception as error:
            raise bad(path, f"cannot be read as a {_READ}: {clean(error, 80)}") from None
    return result, [f"{clean(path.name, 60)}: {line}" for line in notes]


def _stream(file: OpenFile, kind: str) -> tuple[IO[bytes], bool, bool]:
    """Return the stream for Pillow, whether it is a JPEG in several scans, and whether it is the first of several
    images. Raises ModelError for too many blocks."""
    if kind in ("GIF", "TIFF"):
        first, frames = gif.first_picture(file) if kind == "GIF" else tiff.first_picture(file, MAX_DECODED)
        return io.BytesIO(first), False, frames
    if kind == "PNG":
        blocks.check_png(file, file.size)
    elif kind == "BMP":
        blocks.check_bmp(file)
    several = kind == "JPEG" and blocks.check_jpeg(file)
    return io.BufferedReader(file.stream), several, False  # closed with its last reference, and Pillow drops its own


def _what_else(file: OpenFile) -> str:
    """Return advice for a file of another format."""
    brand = file.read(4, 8) if file.size >= 12 else b""
    if brand[:4] == b"ftyp" and brand[4:] in _HEIF:
        return (
            "it is HEIC or AVIF, as telephones save it: export it as JPEG (on a Mac: sips -s format jpeg IN --out OUT)"
        )
    return "convert it to one of them"


def _check_size(path: Path, picture: Image, several: bool) -> None:
    several = several or "progressive" in picture.info
    kind = "JPEG in several scans" if several else picture.format or ""
    most = min(MAX_PIXELS, MAX_DECODED // DECODED_BYTES.get(kind, 7))
    width, height = picture.size
    if width * height > most or max(width, height) > MAX_SIDE:
        of = f" of a {kind.replace('WEBP', 'WebP')}" if kind in DECODED_BYTES else ""
        limit = f"at most {most // 1_000_000} megapixels{of} and {MAX_SIDE:,} a side are read; make it smaller"
        raise bad(path, f"is {width}x{height}; {limit}")
