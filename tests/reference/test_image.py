"""Pixels against diffusers' own post-processing, PNG text against a chunk reader written here, hostile PNGs."""

from __future__ import annotations

import io
import os
import struct
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qwenimg.common.base.errors import ModelError, NumericsError
from qwenimg.common.pictures.pixels import blank_warning, crop, to_uint8
from qwenimg.common.pictures.png import encode_png, read_text

PIXELS = np.random.default_rng(3).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def chunks(png: bytes) -> list[tuple[str, bytes]]:
    """Type and data of every chunk, CRCs checked: the PNG specification, independent of Pillow."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        body = png[at + 4 : at + 8 + length]
        assert zlib.crc32(body) == int.from_bytes(png[at + 8 + length : at + 12 + length], "big")
        found.append((body[:4].decode(), body[4:]))
        at += 12 + length
    return found


def png_with(*extra: tuple[bytes, bytes], size: tuple[int, int] = (1, 1)) -> bytes:
    """A PNG of grey pixels whose text chunks are `extra` as given."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0)
    body = [(b"IHDR", head), *extra, (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in body)


# Pixels


@pytest.mark.parametrize("channels", [3, 4])
def test_to_uint8_equals_diffusers(channels: int) -> None:
    import torch
    from diffusers.image_processor import VaeImageProcessor

    rng = np.random.default_rng(0)
    pixels = rng.normal(0, 0.8, (channels, 131, 97)).astype(np.float32)
    halves = ((np.arange(255) + 0.5) / 255 * 2 - 1).astype(np.float32)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(2)), np.nextafter(halves, np.float32(-2))])
    pixels.reshape(-1)[: near.size] = near
    ties = ((near * np.float32(0.5) + np.float32(0.5)) * np.float32(255)) % 1 == 0.5
    [expected] = VaeImageProcessor().postprocess(torch.from_numpy(pixels)[None], output_type="pil")
    got = to_uint8(pixels)
    wrong = int((got != np.asarray(expected)).sum())
    print(f"to_uint8, {channels} channels: {wrong} of {got.size} differ; exact halves tried: {ties.sum()}")
    assert wrong == 0 and ties.sum() > 100
    assert got.shape == (131, 97, channels) and got.dtype == np.uint8 and got.flags.c_contiguous


def test_to_uint8_of_half_and_double_precision() -> None:
    pixels = np.linspace(-1.2, 1.2, 3 * 4 * 5).reshape(3, 4, 5)
    assert (to_uint8(pixels) == to_uint8(pixels.astype(np.float32))).all()
    assert (to_uint8(pixels.astype(np.float16)) == to_uint8(pixels.astype(np.float16).astype(np.float32))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_is_never_a_picture(value: float) -> None:
    pixels = np.zeros((3, 9, 5), np.float32)
    pixels[1, 8, 4] = value
    with pytest.raises(NumericsError, match=r"1 of 135 values"):
        to_uint8(pixels)


def test_crop_keeps_the_top_left() -> None:
    assert (crop(PIXELS, 4, 3) == PIXELS[:3, :4]).all()
    assert crop(PIXELS, 4, 3).shape == (3, 4, 3)


def test_blank_warning() -> None:
    rng = np.random.default_rng(1)
    flat = np.full((30, 31, 4), 128, np.uint8)
    flat[..., 3] = 255  # alpha must not count
    flat[0, 0, 0] = 140
    assert "blank" in (blank_warning(flat) or "")
    clipped = rng.choice(np.array([0, 255], np.uint8), (30, 31, 3))
    assert "100.0%" in (blank_warning(clipped) or "")
    clipped[0, :9] = 7  # 27 of 2790: 99.03 % are left
    assert "99.0%" in (blank_warning(clipped) or "")
    clipped[0, :10] = 7  # 98.9 %
    assert blank_warning(clipped) is None
    assert blank_warning(rng.integers(126, 131, (30, 31, 3), dtype=np.uint8)) is None  # std 1.41


# Text

TEXTS = {
    "plain": "a red circle",
    "latin": "café",
    "chinese": "一只猫,水彩\n第二行",
    "escape": "\x1b[31mred\x1b[0m\r\n\ttab",
    "emoji": "👩‍🚀 in space",
    "long": "a cat. " * 450_000,
    "long chinese": "猫" * 1_050_000,
}


def test_text_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(encode_png(PIXELS, TEXTS, None))
    assert read_text(path) == TEXTS
    with Image.open(path) as picture:
        assert (np.asarray(picture) == PIXELS).all() and picture.text == TEXTS


def test_latin_1_is_text_and_the_rest_is_international_text() -> None:
    kinds = {data.split(b"\0")[0].decode(): kind for kind, data in chunks(encode_png(PIXELS, TEXTS, "<x/>"))}
    assert kinds["plain"] == kinds["latin"] == kinds["escape"] == "tEXt"
    assert kinds["chinese"] == kinds["emoji"] == kinds["XML:com.adobe.xmp"] == "iTXt"


def test_what_png_text_cannot_hold_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    png = encode_png(PIXELS, {"a": "nul \0 end", "b": "lone \udcff end 猫"}, None)
    path.write_bytes(png)
    assert read_text(path) == {"a": "nul \\x00 end", "b": "lone \\udcff end 猫"}
    assert ("tEXt", b"a\0nul \\x00 end") in chunks(png)


@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=40))
def test_any_text_can_be_written_and_read(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.png"
    path.write_bytes(encode_png(PIXELS[:1, :1], {"k": text}, None))
    got = read_text(path)["k"]
    assert got.encode().decode() == got
    assert got == text or "\0" in text or any("\ud800" <= c <= "\udfff" for c in text)


@pytest.mark.parametrize("channels", [3, 4])
def test_png_bytes_are_deterministic_and_lossless(channels: int) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (33, 17, channels), dtype=np.uint8)
    first = encode_png(pixels, {"parameters": "a\nb", "z": "1"}, "<x/>")
    assert first == encode_png(pixels.copy(), {"parameters": "a\nb", "z": "1"}, "<x/>")
    assert (np.asarray(Image.open(io.BytesIO(first))) == pixels).all()
    assert chunks(encode_png(pixels[::2, ::-1], {}, None))[0][0] == "IHDR"


def test_without_metadata_there_is_no_text_chunk() -> None:
    assert {kind for kind, _ in chunks(encode_png(PIXELS, {}, None))} == {"IHDR", "IDAT", "IEND"}


# Hostile files


@cache
def hostile() -> dict[str, bytes]:
    jpeg = io.BytesIO()
    Image.fromarray(PIXELS).save(jpeg, "JPEG")
    good = encode_png(PIXELS, {"k": "v" * 50}, None)
    return {
        "empty": b"",
        "text": b"hello",
        "jpeg": jpeg.getvalue(),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "header cut": good[:20],
        "text cut": good[:60],
        "ztxt bomb": png_with((b"zTXt", b"k\0\0" + zlib.compress(bytes(50_000_000)))),
        "many ztxt": png_with(*[(b"zTXt", b"k\0\0" + zlib.compress(bytes(1_000_000)))] * 80),
        "iccp bomb": png_with((b"iCCP", b"k\0\0" + zlib.compress(bytes(50_000_000)))),
        "long text chunk": png_with()[:33] + struct.pack(">I", 2**31 - 1) + b"tEXtk\0v",
    }


@pytest.mark.parametrize("side", [9_600, 13_504, 16_384, 2**31 - 1])
def test_the_text_of_a_large_picture_is_read(tmp_path: Path, side: int, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(png_with((b"tEXt", b"k\0v"), size=(side, side)))
    assert read_text(path) == {"k": "v"} and not recwarn.list


@pytest.mark.parametrize("name", hostile())
def test_hostile_png_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(hostile()[name])
    with pytest.raises(ModelError) as caught:
        read_text(path)
    assert "x.png" in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) <= 300
    print(caught.value)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    for name in ("fifo.png", "zero.png", "loop.png", "none.png", ".", "nul\0.png", "n" * 300):
        with pytest.raises(ModelError):
            read_text(tmp_path / name)


@settings(max_examples=300)
@given(st.data())
def test_mutants_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    itxt = (b"iTXt", b"k\0\x01\0en\0k\0" + zlib.compress("猫".encode()))
    png = bytearray(png_with((b"tEXt", b"a\0b"), (b"zTXt", b"c\0\0" + zlib.compress(b"d")), itxt))
    for _ in range(data.draw(st.integers(1, 4))):
        png[data.draw(st.integers(8, len(png) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutant.png"
    path.write_bytes(png)
    try:
        assert all(type(v) is str for v in read_text(path).values())
    except ModelError as error:
        assert str(error).isprintable()
