"""BMP, GIF and TIFF to start from: the pixels are Pillow's own, and only the first picture is read."""

from __future__ import annotations

import io
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from qwenimg.common.base.errors import ModelError
from qwenimg.common.pictures.input import read_image, read_mask
from qwenimg.common.pictures.pixels import over_white

PIXELS = np.random.default_rng(3).integers(0, 256, (37, 53, 3), np.uint8)
FLAT = Image.fromarray(PIXELS)
GREY = FLAT.convert("L")
LAYER = Image.fromarray(np.dstack([PIXELS, np.full((37, 53), 255, np.uint8)]))
SIXTEEN = np.random.default_rng(4).integers(0, 65536, (37, 53)).astype(np.uint16)
FRAMES = {"save_all": True, "append_images": [FLAT.rotate(180), FLAT.rotate(90)]}
SAVED: dict[str, tuple[Image.Image, str, dict[str, object]]] = {
    "bmp": (FLAT, "BMP", {}),
    "bmp grey": (GREY, "BMP", {}),
    "bmp black and white": (FLAT.convert("1"), "BMP", {}),
    "bmp palette": (FLAT.convert("P"), "BMP", {}),
    "bmp transparent": (LAYER, "BMP", {}),
    "gif": (FLAT.convert("P"), "GIF", {}),
    "gif grey": (GREY, "GIF", {}),
    "gif animated": (FLAT.convert("P"), "GIF", FRAMES),
    "gif transparent": (FLAT.convert("P"), "GIF", {"transparency": 3}),
    "gif with a comment": (FLAT.convert("P"), "GIF", {"comment": b"x" * 5000}),
    **{
        f"tiff {mode} {compression}": (image, "TIFF", {"compression": compression})
        for mode, image in (("RGB", FLAT), ("grey", GREY), ("palette", FLAT.convert("P")), ("alpha", LAYER))
        for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
    },
    "tiff black and white": (FLAT.convert("1"), "TIFF", {}),
    "tiff CMYK": (FLAT.convert("CMYK"), "TIFF", {"compression": "tiff_lzw"}),
    "tiff pages": (FLAT, "TIFF", FRAMES),
    "tiff strips": (FLAT, "TIFF", {"strip_size": 500}),
}


def saved(case: str) -> bytes:
    image, kind, options = SAVED[case]
    out = io.BytesIO()
    image.save(out, format=kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize("case", SAVED)
def test_the_pixels_are_pillows(tmp_path: Path, case: str) -> None:
    (tmp_path / "a").write_bytes(saved(case))
    with Image.open(tmp_path / "a") as picture:
        several = getattr(picture, "n_frames", 1) > 1
        layer = ImageOps.exif_transpose(picture).convert("RGBA")
    expected = Image.new("RGBA", layer.size, "white")
    expected.alpha_composite(layer)
    pixels, told = read_image(tmp_path / "a")
    assert np.array_equal(over_white(pixels), np.asarray(expected.convert("RGB")))
    see_through = layer.getextrema()[3][0] < 255
    assert pixels.shape[2] == (4 if see_through else 3)
    assert not see_through or np.array_equal(pixels, np.asarray(layer))
    assert ("a: has several pictures (an animation, pages, or views); the first is taken" in told) == several


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bits_are_scaled(tmp_path: Path, order: str) -> None:
    rows, columns = SIXTEEN.shape
    said = {
        256: columns,
        257: rows,
        258: 16,
        259: 1,
        262: 1,
        273: 8 + 2 + 9 * 12 + 4,
        277: 1,
        278: rows,
        279: SIXTEEN.nbytes,
    }
    values = SIXTEEN.astype(f"{order}u2").tobytes()
    (tmp_path / "a.tiff").write_bytes(
        entries(*((tag, 4, 1, value) for tag, value in said.items()), order=order, tail=values)
    )
    pixels, told = read_image(tmp_path / "a.tiff")
    assert np.array_equal(pixels[..., 0], np.rint(SIXTEEN / 65535 * 255)) and "16 bits" in told[1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_as_it_says(tmp_path: Path, orientation: int) -> None:
    FLAT.save(tmp_path / "a.tiff", tiffinfo={274: orientation})
    exif = Image.Exif()
    exif[274] = orientation
    FLAT.save(tmp_path / "a.png", exif=exif)
    pixels, told = read_image(tmp_path / "a.tiff")
    assert np.array_equal(pixels, read_image(tmp_path / "a.png")[0])
    assert bool(told) == (orientation > 1)


def test_a_mask_may_be_any_of_them(tmp_path: Path) -> None:
    for kind in ("BMP", "GIF", "TIFF"):
        GREY.save(tmp_path / "m", format=kind)
        assert np.array_equal(read_mask(tmp_path / "m", PIXELS)[0], np.asarray(GREY))


# What is refused


def entries(*given: tuple[int, int, int, int], order: str = "<", magic: int = 42, tail: bytes = b"") -> bytes:
    """A TIFF of these entries: tag, type, number of values, and value or place."""
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", magic, 8, len(given))
    return head + b"".join(struct.pack(order + "HHII", *one) for one in given) + bytes(4) + tail


def plain(side: int, **changes: tuple[int, int]) -> bytes:
    """One of `side` x `side` grey pixels in one strip, with another type and value of some entries."""
    values = {"width": (256, side), "height": (257, side), "bits": (258, 8), "compression": (259, 1), "kind": (262, 1)}
    values |= {"strip": (273, 8), "channels": (277, 1), "rows": (278, side), "bytes": (279, side * side)}
    return entries(*sorted((tag, 4, 1, value) for tag, value in (values | changes).values()))


def bmp(side: int, compression: int = 0) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def gif(side: int, tail: bytes = b"") -> bytes:
    """One picture of `side` x `side`, as far as the header says."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes(6)
    return head + tail + b"," + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02\x02\x4c\x01\x00;"


ONE_ENTRY, MANY_ENTRIES = (struct.pack("<HHI", 258, 4, count) for count in (1, 1 << 28))
EMPTY = b"!\xfe\0"  # a comment of nothing
REFUSED = {
    "bmp too large": (bmp(9_000), "at most 36 megapixels"),
    "bmp run-length": (bmp(64, 1), "run-length"),
    "bmp cut short": (saved("bmp")[:200], "cannot be read"),
    "gif too large": (gif(9_000), "at most 36 megapixels"),
    "gif cut short": (saved("gif")[:-40], "ends before its pixels"),
    "gif without a picture": (gif(64)[:19] + b";", "without a picture"),
    "gif of many comments": (gif(64, EMPTY * 200_000), "more than 10,000 blocks"),
    "gif of one long comment": (gif(64, b"!\xfe" + b"\x01x" * 2_000_000 + b"\0"), "more than 10,000 blocks"),
    "gif broken": (gif(64, b"?"), "broken GIF"),
    "tiff too large": (plain(4_000, bytes=(279, 10)) + bytes(200), "at most 12 megapixels of a TIFF"),
    "tiff of many entries": (entries(*[(256, 4, 1, 8)] * 2_000), "more than 1,000 entries"),
    "tiff of a large entry": (plain(8).replace(ONE_ENTRY, MANY_ENTRIES), "values in entry 258"),
    "tiff of floats": (plain(8, form=(339, 3)) + bytes(64), "floating-point"),
    "tiff as JPEG": (plain(8, compression=(259, 7)) + bytes(64), "compression 7"),
    "tiff of a raw photograph": (plain(8, preview=(254, 1)) + bytes(64), "preview"),
    "tiff in Lab": (plain(8, kind=(262, 8)) + bytes(64), "colour kind 8"),
    "tiff in huge tiles": (plain(8, w=(322, 1 << 16), h=(323, 1 << 15)) + bytes(64), "in tiles of"),
    "tiff of no size": (plain(0) + bytes(64), "cannot be read"),
    "tiff of too many bytes": (plain(8, bytes=(279, 1 << 30)), "bytes of pixels"),
    "tiff behind its end": (plain(64), "ends before its pixels"),
    "tiff cut short": (saved("tiff RGB raw")[:100], "ends before its pixels"),
    "bigtiff": (entries((256, 4, 1, 8), magic=43), "BigTIFF"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(64), "export it as JPEG"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_so_in_one_line_and_soon(tmp_path: Path, case: str) -> None:
    raw, words = REFUSED[case]
    path = tmp_path / "a.bin"
    path.write_bytes(raw)
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        read_image(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    text = str(caught.value)
    print(f"{time.process_time() - begun:.2f} s, {peak / 1e6:.1f} MB: {text}")
    assert words in text and "a.bin" in text and text.isprintable() and len(text) < 280
    assert time.process_time() - begun < 5  # of the processor, traced; a tenth of it untraced
    assert peak < 8e6 + 2 * len(raw)


@pytest.mark.parametrize(
    "case", ["bmp", "bmp palette", "gif animated", "tiff RGB tiff_lzw", "tiff strips", "tiff alpha raw"]
)
@pytest.mark.sample(2)
def test_mutants_are_read_or_refused(tmp_path: Path, case: str) -> None:
    """Bytes changed, cut, doubled: nothing but pixels or a ModelError comes out, and soon."""
    whole, chance = saved(case), random.Random(case)
    path = tmp_path / "a"
    read = 0
    for _ in range(300):
        raw = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(min(len(raw), 400)) if chance.random() < 0.7 else chance.randrange(len(raw))
            raw[at] = chance.choice((0, 1, 255, chance.randrange(256)))
        if chance.random() < 0.2:
            raw = raw[: chance.randrange(len(raw))]
        path.write_bytes(raw)
        begun = time.process_time()
        try:
            pixels, _ = read_image(path)
            assert pixels.dtype == np.uint8 and pixels.shape[2] in (3, 4)
            read += 1
        except ModelError as error:
            assert str(error).isprintable() and "\n" not in str(error)
        assert time.process_time() - begun < 5
    print(f"{read} of 300 were read")
    assert 0 < read < 300
