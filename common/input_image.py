"""Pictures that a user gives to start from, and masks: PNG, JPEG and WebP, read with care."""

from __future__ import annotations

import io
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qwenimg.common.errors import ModelError
from qwenimg.common.image import Uint8
from qwenimg.common.untrusted import bad, open_regular, short

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_FILE = 512 << 20  # bytes
MAX_PIXELS = 64_000_000  # looked at before anything is decoded
MAX_SIDE = 32_768


def read_image(path: Path) -> tuple[Uint8, list[str]]:
    """The picture at `path`, uint8 [H, W, 3], turned as its EXIF says, and warnings. Raises ModelError.

    A transparent picture is laid on white, and said so."""
    picture = _open(path)
    told = []
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        from PIL import Image

        layer = picture.convert("RGBA")
        if np.asarray(layer)[..., 3].min() < 255:
            told.append(f"{path.name}: is transparent in parts; they are taken as white")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return np.ascontiguousarray(np.asarray(_eight_bits(picture).convert("RGB"))), told


def read_mask(path: Path, like: Uint8) -> Uint8:
    """The mask at `path`, uint8 [H, W]: white is made anew, black is kept. Raises ModelError unless it has the size of
    the picture `like`."""
    picture = _open(path)
    if (picture.height, picture.width) != like.shape[:2]:
        size = f"{like.shape[1]}x{like.shape[0]}"
        raise bad(path, f"is {picture.width}x{picture.height}, the picture is {size}: make the mask of that size")
    if picture.mode in ("RGBA", "LA", "PA"):
        picture = picture.convert("RGBA").convert("RGB")
    return np.ascontiguousarray(np.asarray(_eight_bits(picture).convert("L")))


def _open(path: Path) -> Image:
    """Decoded and turned upright."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    with closing(open_regular(path)) as file:
        if file.size > MAX_FILE:
            raise bad(path, f"has {file.size / 1e6:,.0f} MB; pictures of at most {MAX_FILE / 1e6:,.0f} MB are read")
        raw = file.read(0, file.size)
    try:
        # The limit on pixels is ours, so Pillow's warning about large pictures says nothing new.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(raw), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                most = f"at most {MAX_PIXELS // 1_000_000} megapixels and {MAX_SIDE:,} a side are read"
                raise bad(path, f"is {width}x{height}; {most}")
            picture.load()
            return ImageOps.exif_transpose(picture)
    except ModelError:
        raise
    except Image.DecompressionBombError:  # Pillow's own limit, which is higher, is looked at first
        raise bad(path, f"is too large: at most {MAX_PIXELS // 1_000_000} megapixels are read") from None
    except UnidentifiedImageError:
        raise bad(path, "is no PNG, JPEG or WebP picture; convert it to one of them") from None
    # Pillow's decoders raise whatever they raise; in every case the file is at fault.
    except Exception as error:
        raise bad(path, f"cannot be read as a PNG, JPEG or WebP picture: {short(error, 80)}") from None


def _eight_bits(picture: Image) -> Image:
    """A picture of 16 or 32 bits a value in 8: Pillow's own conversion would clip and not scale."""
    from PIL import Image

    if not picture.mode.startswith(("I", "F")):
        return picture
    values = np.asarray(picture).astype(np.float64)
    most = 65535 if picture.mode.startswith("I") else max(1.0, float(values.max(initial=0)))
    return Image.fromarray(np.rint(values / most * 255).clip(0, 255).astype(np.uint8))
