"""The texts that a PNG, JPEG or WebP carries besides its pixels, by the names that PNG has for them.

Nothing is decoded, so an image may claim any size. JPEG and WebP are parsed here, since Pillow's reader of WebP
allocates all pixels before it gives any text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from qwenimg.common.base.safe_files import OpenFile, bad, open_regular, open_source
from qwenimg.common.pictures import png
from qwenimg.common.pictures.containers import exif

MAX_SEGMENTS = 10_000  # segments of a JPEG or WebP that are read; an animation has one for each image
MAX_CHUNK = 8 << 20  # bytes of one text in a WebP
XMP_KEY = "XML:com.adobe.xmp"
RECIPE_TAGS = "<qwenimg:recipe>", "</qwenimg:recipe>"  # in XMP, which JPEG and WebP have and PNG's text has not
UPSCALING = "qwenimg-upscaling"  # the record of an upscaling, beside the recipe
UPSCALING_TAGS = "<qwenimg:upscaling>", "</qwenimg:upscaling>"
_STARTS = {
    b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP", b"GIF87a": "GIF", b"GIF89a": "GIF",
    b"II*\0": "TIFF", b"MM\0*": "TIFF", b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
}  # fmt: skip
_ENTITIES = ("&quot;", '"'), ("&#34;", '"'), ("&apos;", "'"), ("&#39;", "'")
_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"


def picture_format(path: Path) -> str | None:
    """Return the format of the file at `path`, as `format_of` does. Raises ModelError if it is no file."""
    with closing(open_regular(path)) as file:
        return format_of(file)


def format_of(file: OpenFile) -> str | None:
    """Return PNG, JPEG, WEBP, BMP, GIF or TIFF by the first bytes of `file`, else None."""
    head = file.read(0, min(file.size, 12))
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for start, kind in _STARTS.items() if head.startswith(start)), None)


def read_texts(source: Path | OpenFile) -> dict[str, str]:
    """Read, at a path or in an open file, PNG's text chunks; `UserComment` of EXIF; XMP as `XML:com.adobe.xmp`; our
    recipe in any of them as `qwenimg`.

    Closes the file. Raises ModelError if it is no PNG, JPEG or WebP, or broken where its texts are."""
    with closing(open_source(source)) as file:
        kind = format_of(file)
        if kind == "JPEG":
            texts = _from_blocks(file, _jpeg_blocks(file))
        elif kind == "WEBP":
            texts = _from_blocks(file, _webp_blocks(file))
        elif kind == "PNG":
            texts = png.read_text(file)
        else:
            raise bad(file.path, "is no PNG, JPEG or WebP picture, and only these hold a recipe")
    xmp = texts.get(XMP_KEY, "")
    ours = {"qwenimg": _tagged(xmp, *RECIPE_TAGS), UPSCALING: _tagged(xmp, *UPSCALING_TAGS)}
    return {key: text for key, text in ours.items() if text is not None} | texts


def _tagged(xmp: str, opening: str, closing: str) -> str | None:
    """Return our text between two tags in XMP, or None. Another program may have replaced its quotes by entities."""
    begin = xmp.find(opening)
    end = xmp.find(closing, begin)
    if begin < 0 or end < 0:
        return None
    text = xmp[begin + len(opening) : end]
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    return text


def _from_blocks(file: OpenFile, blocks: Iterator[tuple[str, int, int]]) -> dict[str, str]:
    """Return the texts of the first block of each kind."""
    first: dict[str, tuple[int, int]] = {}
    for kind, begin, length in blocks:
        first.setdefault(kind, (begin, length))
    texts = exif.texts(file.read(*first["EXIF"]), file.path) if "EXIF" in first else {}
    if "XMP" in first:
        try:
            texts[XMP_KEY] = file.read(*first["XMP"]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad(file.path, f"has XMP data that is not UTF-8 (byte {error.start})") from None
    return texts


def _jpeg_blocks(file: OpenFile) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first byte and length of a JPEG's EXIF and XMP, which stand before its pixels."""
    at = 2
    for _ in range(MAX_SEGMENTS):
        if at + 4 > file.size:
            raise bad(file.path, "is a JPEG that ends before its pixels")
        start, marker, length = struct.unpack(">BBH", file.read(at, 4))
        if start != 0xFF or (length < 2 and marker != 0xFF):
            raise bad(file.path, f"is a broken JPEG: no marker at byte {at}")
        if marker in (0xD9, 0xDA):  # the end, or the pixels
            return
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker == 0xE1:
            if at + 2 + length > file.size:
                raise bad(file.path, "is a JPEG that ends before its pixels")
            head = file.read(at + 4, min(length - 2, len(_XMP)))
            for kind, name in (("EXIF", _EXIF), ("XMP", _XMP)):
                if head.startswith(name):
                    yield kind, at + 4 + len(name), length - 2 - len(name)
        at += 2 + length
    raise bad(file.path, f"is a JPEG of more than {MAX_SEGMENTS:,} segments; at most so many are read")


def _webp_blocks(file: OpenFile) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first byte and length of a WebP's EXIF and XMP chunks, which come after the pixels."""
    at = 12
    for _ in range(MAX_SEGMENTS):
        if at + 8 > file.size:
            return
        name, length = struct.unpack("<4sI", file.read(at, 8))
        if name in (b"EXIF", b"XMP "):
            if length > MAX_CHUNK:
                raise bad(file.path, f"has {length:,} bytes of {name.decode().strip()}; at most {MAX_CHUNK:,} are read")
            yield name.decode().strip(), at + 8, length
        at += 8 + length + length % 2
    raise bad(file.path, f"is a WebP of more than {MAX_SEGMENTS:,} chunks; at most so many are read")
