"""PNG files with text in them. Who only reads the text, such as a server's front, loads no numpy."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from qwenimg.common.base.safe_files import OpenFile, bad, open_source
from qwenimg.common.base.text import clean
from qwenimg.common.pictures.containers import blocks, exif

if TYPE_CHECKING:
    from qwenimg.common.pictures.pixels import Uint8

SIGNATURE = b"\x89PNG\r\n\x1a\n"
BATCH_KEY = b"qwenimg batch\0"  # the keyword of a text chunk with the key of a picture in its batch
TEXT_LIMIT = 32 << 20  # bytes of a PNG that are searched for its text: two 3 MB prompts, escaped, fit
ZLIB_LEVEL = 4  # on a smooth 1328x1328 image as small as level 6 in half the time


def encode_png(pixels: Uint8, text: Mapping[str, str], xmp: str | None) -> bytes:
    """Encode [H, W, C], C 3 or 4, as a PNG: the same bytes for the same input and the same Pillow and zlib.

    Each item of `text` becomes tEXt if it is Latin-1, else iTXt in UTF-8. NUL and lone surrogates, which PNG text
    cannot hold, are stored as their escapes (`\\x00`, `\\udcff`)."""
    import numpy as np
    from PIL import Image, PngImagePlugin

    chunks = PngImagePlugin.PngInfo()
    for key, value in text.items():
        chunks.add_text(key, storable(value))
    if xmp is not None:
        chunks.add_itxt("XML:com.adobe.xmp", xmp)
    out = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    picture.save(out, format="PNG", pnginfo=chunks, compress_level=ZLIB_LEVEL)
    return out.getvalue()


def storable(text: str) -> str:
    """Replace NUL and lone surrogates, which no format's text can hold, by their escapes."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def read_text(source: Path | OpenFile) -> dict[str, str]:
    """Read the text chunks (tEXt, zTXt, iTXt) and EXIF texts of a PNG, at a path or in an open file, that stand before
    its pixels. Closes the file.

    Only the first 32 MiB are read, and no pixels decoded. The image may have any size: Pillow's limit, which guards
    decoding, is in `Image.open` and not here. Raises ModelError if it is no regular file or no readable PNG."""
    from PIL.PngImagePlugin import PngImageFile

    with closing(open_source(source)) as file:
        path = file.path
        end = min(file.size, TEXT_LIMIT)
        blocks.check_png(file, end)
        head = file.read(0, end)
    try:
        with warnings.catch_warnings(action="ignore"), PngImageFile(io.BytesIO(head)) as picture:
            texts = {str(k): str(v) for k, v in picture.info.items() if isinstance(v, str)}
            block = picture.info.get("exif")
    # Pillow's readers of chunks raise errors of many types; in every case the file is at fault.
    except Exception as error:
        raise bad(path, f"cannot be read as a PNG: {clean(error, 80)}") from None
    return texts | (exif.texts(block, path) if isinstance(block, bytes) else {})


def with_batch_key(png: bytes, key: str) -> bytes:
    """Return a PNG of ours with its key in a text chunk before the last one."""
    end = len(png) - 12  # IEND has no data
    assert png.startswith(SIGNATURE) and png[end + 4 : end + 8] == b"IEND", "not a PNG of ours"
    chunk = b"tEXt" + BATCH_KEY + key.encode("ascii")
    return png[:end] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[end:]


def has_batch_key(png: bytes, key: str) -> bool:
    """Return whether a file is a whole PNG, by the checksums of its chunks, with this key in its last text."""
    if not png.startswith(SIGNATURE):
        return False
    at, last = len(SIGNATURE), b""
    while at + 12 <= len(png):
        length = int.from_bytes(png[at : at + 4])
        name, chunk = png[at + 4 : at + 8], memoryview(png)[at + 4 : at + 8 + length]
        at += 12 + length
        if at > len(png) or zlib.crc32(chunk) != int.from_bytes(png[at - 4 : at]):
            return False
        if name == b"IEND":
            return at == len(png) and last == BATCH_KEY + key.encode("ascii")
        if name == b"tEXt":
            last = bytes(chunk[4:])
    return False
