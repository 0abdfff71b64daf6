"""Encoding of an image and its recipe as a file: PNG and WebP without loss, JPEG at quality 95.

WebP is always lossless: with loss it would halve the resolution of the colours at any quality.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np

from qwenimg.common.base.atomic_files import JPEG, PICTURES
from qwenimg.common.base.errors import UsageError
from qwenimg.common.pictures.pixels import Uint8, fit, over_white
from qwenimg.common.pictures.png import encode_png, storable
from qwenimg.common.pictures.texts import RECIPE_TAGS, UPSCALING, UPSCALING_TAGS
from qwenimg.common.request.recipe import XMP, Recipe, png_text

QUALITY = 95  # JPEG's
THUMBNAIL = 320  # pixels
EFFORT = 20  # WebP's, 0 to 100
MAX_JPEG_TEXT = 65_000  # bytes: a segment of a JPEG holds 65,533 with its name
_BESIDE = 10_000  # the most bytes of a recipe without its prompts; the longest of the tests has 2,500
_MAX_SIDE = {".webp": 16_383, ".jpg": 65_500, ".jpeg": 65_500}  # limits of the formats in Pillow
_NAMESPACE = 'xmlns:qwenimg="urn:qwenimg:recipe"'


def check(suffix: str, width: int, height: int, prompts: str) -> None:
    """Raise UsageError, before an image is generated, for a size or prompts that a file with this `suffix` cannot hold.
    `prompts`: the long texts of its recipe."""
    suffix = suffix.lower()
    most = _MAX_SIDE.get(suffix)
    if most is not None and max(width, height) > most:
        raise UsageError(f"{width}x{height}: {suffix} holds at most {most:,} pixels a side; write .png")
    text = max(len(_escaped(json.dumps(prompts))), 2 * len(prompts))  # in XMP, and in UTF-16
    if suffix in JPEG and text + _BESIDE > MAX_JPEG_TEXT:
        raise _too_long(suffix)


def encode(pixels: Uint8, recipe: Recipe | None, suffix: str) -> bytes:
    """Encode [H, W, 3], or [H, W, 4] with alpha, as a file with this `suffix`, one of PICTURES in any case. JPEG, which
    has no alpha, gets the image on white. Without a recipe the mark of AI
    origin is left out too. The bytes are the same for the same input and the same Pillow. JPEG and WebP have the text
    for other programs as EXIF UserComment, and our recipe in their XMP.

    Raises UsageError for another suffix, and for a size or a prompt that the format cannot hold."""
    return encode_texts(pixels, {} if recipe is None else png_text(recipe), XMP, suffix)


def encode_texts(pixels: Uint8, text: Mapping[str, str], mark: str, suffix: str) -> bytes:
    """Encode pixels as `encode` does, with these texts, by PNG's names for them, and the XMP `mark` of the picture's
    origin; with neither if there is no text. Raises as `encode` does."""
    suffix = suffix.lower()
    if suffix not in PICTURES:
        raise UsageError(f"{suffix or 'no suffix'}: pictures are written as {', '.join(PICTURES)}; choose one of them")
    if suffix == ".png":
        return encode_png(pixels, text, mark if text else None)
    check(suffix, pixels.shape[1], pixels.shape[0], "")
    return _encode_other(pixels, text, mark, suffix)


def _encode_other(pixels: Uint8, text: Mapping[str, str], mark: str, suffix: str) -> bytes:
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(over_white(pixels) if suffix in JPEG else pixels))
    comment = text.get("parameters", text.get("postprocessing", ""))
    more = {"exif": _exif(comment), "xmp": _xmp(mark, text)} if text else {}
    if suffix in JPEG and any(len(block) > MAX_JPEG_TEXT for block in more.values()):
        raise _too_long(suffix)
    out = io.BytesIO()
    if suffix in JPEG:
        picture.save(out, format="JPEG", quality=QUALITY, subsampling=0, **more)
    else:
        picture.save(out, format="WEBP", lossless=True, exact=True, quality=EFFORT, **more)
    return out.getvalue()


def _too_long(suffix: str) -> UsageError:
    return UsageError(f"the prompt is too long for the recipe in a {suffix}; write .png or .webp, or --no-metadata")


def _exif(parameters: str) -> bytes:
    """Return EXIF with a UserComment in UTF-16, the encoding of AUTOMATIC1111."""
    from PIL import Image
    from PIL.ExifTags import IFD, Base

    block = Image.Exif()
    block.get_ifd(IFD.Exif)[Base.UserComment] = b"UNICODE\0" + storable(parameters).encode("utf-16-be")
    data: bytes = block.tobytes()
    return data if data.startswith(b"Exif\0\0") else b"Exif\0\0" + data


def _xmp(mark: str, text: Mapping[str, str]) -> bytes:
    named = mark.replace("xmlns:xmp=", f"{_NAMESPACE}\n        xmlns:xmp=")
    tagged = (("qwenimg", RECIPE_TAGS), (UPSCALING, UPSCALING_TAGS))
    body = "".join(f"      {begin}{_escaped(text[key])}{end}\n" for key, (begin, end) in tagged if key in text)
    return named.replace("    </rdf:Description>", f"{body}    </rdf:Description>").encode("utf-8")


def _escaped(text: str) -> str:
    """Escape JSON so that it can stand in XML."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def thumbnail(pixels: Uint8) -> bytes:
    """Return a picture of at most THUMBNAIL pixels a side as a JPEG."""
    height, width = pixels.shape[:2]
    share = min(1.0, THUMBNAIL / max(height, width))
    return encode(fit(pixels, max(1, round(width * share)), max(1, round(height * share))), None, ".jpg")
