"""Pictures to start from: what is read, what is refused, and in how many words."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwenimg.common.errors import ModelError
from qwenimg.common.input_image import read_image, read_mask

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_pictures_come_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    Image.fromarray(PIXELS).save(path, format=kind, lossless=True)
    pixels, told = read_image(path)
    assert np.array_equal(pixels, PIXELS) and not told


def test_a_jpeg_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    flat = np.zeros((16, 32, 3), np.uint8)
    flat[:, :16, 0] = 255  # red on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(flat).save(tmp_path / "a.jpg", quality=95, exif=exif)
    pixels, _ = read_image(tmp_path / "a.jpg")
    assert pixels.shape == (32, 16, 3)
    assert pixels[4, 8, 0] > 200 and pixels[28, 8, 0] < 50  # red on top


def test_transparency_becomes_white_and_is_told(tmp_path: Path) -> None:
    layer = np.dstack([PIXELS, np.full((5, 7), 255, np.uint8)])
    layer[0, 0] = (10, 20, 30, 0)
    layer[1, 1, 3] = 128
    Image.fromarray(layer).save(tmp_path / "a.png")
    pixels, told = read_image(tmp_path / "a.png")
    assert pixels[0, 0].tolist() == [255, 255, 255]
    expected = np.rint(PIXELS[1, 1] * (128 / 255) + 255 * (127 / 255))
    assert np.abs(pixels[1, 1] - expected).max() <= 1
    assert len(told) == 1 and "transparent" in told[0]
    layer[..., 3] = 255
    Image.fromarray(layer).save(tmp_path / "b.png")
    assert read_image(tmp_path / "b.png")[1] == []


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257 * 100, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png")[0][0, :, 0].tolist() == [0, 100, 255]


def test_masks(tmp_path: Path) -> None:
    values = np.array([[0, 255, 128]] * 2, np.uint8)
    Image.fromarray(values).save(tmp_path / "m.png")
    assert np.array_equal(read_mask(tmp_path / "m.png", np.zeros((2, 3, 3), np.uint8))[0], values)
    with pytest.raises(ModelError, match="3x2, the picture is 7x5"):
        read_mask(tmp_path / "m.png", PIXELS)


def _huge_png(side: int) -> bytes:
    """A file of a few bytes that claims to have `side` x `side` pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def _saved(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, format=kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is no PNG, JPEG or WebP picture; convert"),
        (b"\x00" * 64, "is no PNG, JPEG or WebP picture; convert"),
        (_saved("PNG")[:60], "cannot be read as a PNG, JPEG or WebP"),
        (_saved("GIF"), "is no PNG, JPEG or WebP picture; convert"),
        (_saved("TIFF"), "is no PNG, JPEG or WebP picture; convert"),
        (_huge_png(9_000), "9000x9000; at most 36 megapixels"),
        (_huge_png(60_000), "at most 36 megapixels"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(raw)
    with pytest.raises(ModelError) as caught:
        read_image(path)
    print(caught.value)
    assert message in str(caught.value) and "a.png" in str(caught.value) and "\n" not in str(caught.value)
    assert "BytesIO" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.png"):
        with pytest.raises(ModelError):
            read_image(path)
