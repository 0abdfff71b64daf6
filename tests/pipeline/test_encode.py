"""JPEG and WebP carry the recipe that a PNG does; what they cannot hold and what is broken is one line."""

from __future__ import annotations

import io
import json
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.encoded import commented, exif, jpeg
from support.recipe_cases import PIXELS, RECIPE, recipe, recipe_from_png
from support.refusals import refused

from qwenimg.common.base.atomic_files import PICTURES
from qwenimg.common.base.errors import ModelError, UsageError
from qwenimg.common.pictures.texts import MAX_CHUNK, MAX_SEGMENTS, XMP_KEY, picture_format, read_texts
from qwenimg.common.pipeline import encode as encoding
from qwenimg.common.pipeline.encode import encode
from qwenimg.common.request.recipe import XMP, a1111_parameters, png_text

OTHERS = [".jpg", ".jpeg", ".webp"]


def webp(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(struct.pack("<4sI", name, len(data)) + data + b"\0" * (len(data) % 2) for name, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def placed(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# Writing


@pytest.mark.parametrize("suffix", [*PICTURES, ".JPG", ".WebP"])
@pytest.mark.parametrize("prompt", ['a <red> & &amp; "circle" ]]>\n--', "猫\nSteps: 1", "nul \0 lone \udcff 👩‍🚀", ""])
def test_the_recipe_comes_back(tmp_path: Path, suffix: str, prompt: str) -> None:
    told = recipe(prompt=prompt, negative_prompt=prompt[::-1], seed=2**64 - 1)
    path = placed(tmp_path / f"x{suffix}", encode(PIXELS, told, suffix))
    assert recipe_from_png(path) == told
    kind = {".png": "PNG", ".webp": "WEBP"}.get(suffix.lower(), "JPEG")
    assert picture_format(path) == kind and Image.open(path).format == kind


@settings(max_examples=60)
@given(prompt=st.text(alphabet=st.characters(exclude_categories=[])), suffix=st.sampled_from(OTHERS))
def test_any_prompt_comes_back(tmp_path_factory: pytest.TempPathFactory, prompt: str, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(encode(PIXELS, recipe(prompt=prompt), suffix))
    assert recipe_from_png(path)["prompt"] == prompt


@pytest.mark.parametrize("suffix", OTHERS)
def test_other_programs_find_their_text_and_the_mark(tmp_path: Path, suffix: str) -> None:
    """Read by Pillow and an XML parser, not by our own reader."""
    told = recipe(prompt="猫, <b>\nzwei")
    with Image.open(placed(tmp_path / f"x{suffix}", encode(PIXELS, told, suffix))) as picture:
        comment = picture.getexif().get_ifd(0x8769)[0x9286]
        xmp = picture.info["xmp"].decode()
    assert comment == b"UNICODE\0" + a1111_parameters(told).encode("utf-16-be")  # as piexif reads it
    kind = ET.fromstring(xmp).find(".//{http://iptc.org/std/Iptc4xmpExt/2008-02-29/}DigitalSourceType")
    inner = ET.fromstring(xmp).find(".//{urn:qwenimg:recipe}recipe")
    assert kind is not None and kind.text is not None and kind.text.endswith("trainedAlgorithmicMedia")
    assert inner is not None and inner.text is not None and json.loads(inner.text) == told


@pytest.mark.parametrize("suffix", PICTURES)
def test_without_a_recipe_there_is_nothing(tmp_path: Path, suffix: str) -> None:
    path = placed(tmp_path / f"x{suffix}", encode(PIXELS, None, suffix))
    assert read_texts(path) == {}
    with Image.open(path) as picture:
        assert not picture.getexif() and "xmp" not in picture.info


@pytest.mark.parametrize(("suffix", "most"), [(".jpg", 2.5), (".webp", 0.0), (".png", 0.0)])
def test_colours_stay_what_they_are(suffix: str, most: float) -> None:
    """A JPEG of 95 of 100 without halved colours, which give 7.7 here, is within 2.5 of 255 (RMS); others are exact."""
    x, y = np.meshgrid(np.arange(96), np.arange(64))
    pixels = np.stack([x * 2, y * 3, 255 - x], -1).astype(np.uint8)
    pixels[16:48, 30:60] = (250, 10, 20)
    got = np.asarray(Image.open(io.BytesIO(encode(pixels, RECIPE, suffix))).convert("RGB")).astype(float)
    rms = float(np.sqrt(((got - pixels) ** 2).mean()))
    print(f"{suffix}: RMS {rms:.2f} of 255")
    assert rms <= most
    assert encode(pixels, RECIPE, suffix) == encode(pixels, RECIPE, suffix)


@pytest.mark.parametrize("suffix", PICTURES)
def test_alpha_is_kept_or_put_on_white(tmp_path: Path, suffix: str) -> None:
    """Colours of transparent pixels too: a layer is composed with others later."""
    layer = np.random.default_rng(5).integers(0, 256, (32, 48, 4), np.uint8)
    layer[:16, ..., 3] = 0
    told = recipe(prompt="layers")
    path = placed(tmp_path / f"x{suffix}", encode(layer, told, suffix))
    assert recipe_from_png(path) == told
    with Image.open(path) as picture:
        pixels = np.asarray(picture)
    if suffix in (".png", ".webp"):
        assert np.array_equal(pixels, layer)
    else:
        assert pixels.shape == (32, 48, 3) and pixels[:12].min() > 200  # white, as far as JPEG keeps it


def test_png_is_as_before() -> None:
    from qwenimg.common.pictures.png import encode_png

    assert encode(PIXELS, RECIPE, ".png") == encode_png(PIXELS, png_text(RECIPE), XMP)


@pytest.mark.parametrize("suffix", ["", ".bmp", ".gif", "png", ".tif"])
def test_other_suffixes_are_refused(suffix: str) -> None:
    with pytest.raises(UsageError, match=r"\.png, \.jpg, \.jpeg, \.webp"):
        encode(PIXELS, None, suffix)


@pytest.mark.parametrize(("suffix", "most"), [(".webp", 16_383), (".jpg", 65_500)])
def test_sizes_that_a_format_has_not(suffix: str, most: int) -> None:
    """The limits are Pillow's own."""
    assert Image.open(io.BytesIO(encode(np.zeros((1, most, 3), np.uint8), None, suffix))).width == most
    encoding.check(suffix, most, 1, "")
    for width, height in ((most + 1, 1), (1, most + 1)):
        with pytest.raises(UsageError, match=rf"{most:,} pixels a side; write \.png"):
            encode(np.zeros((height, width, 3), np.uint8), None, suffix)


@pytest.mark.parametrize("letter", ["a", "猫", "<"])
def test_a_prompt_that_a_jpeg_cannot_hold_is_refused_before(tmp_path: Path, letter: str) -> None:
    """The longest that `check` lets through is written; WebP and PNG hold any."""
    low, high = 1, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            encoding.check(".jpg", 8, 8, letter * middle)
            low = middle
        except UsageError as error:
            assert ".png or .webp" in str(error)
            high = middle
    print(f"a JPEG takes {low:,} of {letter}")
    assert low > 5_000
    told = recipe(prompt=letter * low)
    assert recipe_from_png(placed(tmp_path / "x.jpg", encode(PIXELS, told, ".jpg"))) == told
    with pytest.raises(UsageError, match=r"write \.png or \.webp"):
        encode(PIXELS, recipe(prompt=letter * 70_000), ".jpg")
    told = recipe(prompt=letter * 100_000)
    assert recipe_from_png(placed(tmp_path / "x.webp", encode(PIXELS, told, ".webp"))) == told


# Reading


COMMENTS = [
    b"UNICODE\0" + "猫 a\nb".encode("utf-16-be"),
    b"UNICODE\0" + "猫 a\nb".encode("utf-16-le"),
    b"UNICODE\0" + "猫 a\nb".encode("utf-16"),
    b"ASCII\0\0\0" + "猫 a\nb".encode(),
    b"\0" * 8 + "猫 a\nb\0\0".encode(),
    "猫 a\nb".encode(),
]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("comment", COMMENTS)
def test_user_comments_of_every_kind(tmp_path: Path, comment: bytes, order: str) -> None:
    block = commented(comment, order)
    for name, data in (
        ("a.jpg", jpeg((0xE0, b"JFIF\0"), (0xE1, b"Exif\0\0" + block))),
        ("a.webp", webp((b"VP8 ", b"pixels!"), (b"EXIF", block))),
        ("b.webp", webp((b"EXIF", b"Exif\0\0" + block))),
    ):
        assert read_texts(placed(tmp_path / name, data)) == {"UserComment": "猫 a\nb"}
    picture = io.BytesIO()
    Image.new("RGB", (3, 4)).save(picture, "PNG", exif=b"Exif\0\0" + block)
    assert read_texts(placed(tmp_path / "a.png", picture.getvalue())) == {"UserComment": "猫 a\nb"}


BAD_EXIF = [
    b"", b"II", b"XX*\0\x08\0\0\0", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff",
    exif((0x8769, 4, 1, b"\xff\xff\xff\xff")), exif((0x0110, 2, 0xFFFFFFFF, b"\x08\0\0\0")),
    commented(b"UNICODE\0\xd8\1\xd8\1"), commented(b"ASCII\0\0\0\xff\xfe\xfd"), commented(b"UNICODE\0abc"),
]  # fmt: skip


@pytest.mark.parametrize("block", BAD_EXIF)
def test_broken_exif_is_one_line(tmp_path: Path, block: bytes) -> None:
    for name, data in (
        ("x.jpg", jpeg((0xE1, b"Exif\0\0" + block))),
        ("x.webp", webp((b"EXIF", block))),
    ):
        assert "EXIF" in refused(read_texts, placed(tmp_path / name, data))


def test_a_table_of_many_large_entries_costs_nothing(tmp_path: Path) -> None:
    """5,000 entries that each name the whole block: a reader that keeps them holds 320 MB."""
    entries = [(0x9286, 7, 60_000, struct.pack("<I", 8))] * 5_000
    block = exif(*entries)
    table = exif((0x8769, 4, 1, struct.pack("<I", 26)), sub=block[8:])
    with pytest.raises(ModelError):
        read_texts(placed(tmp_path / "x.jpg", jpeg((0xE1, b"Exif\0\0" + table + bytes(10)))))


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff", b"\xff\xd8\xff\xe1", b"\xff\xd8\xff\xe1\0\0", b"\xff\xd8\xff\xe1\xff\xffExif\0\0",
        b"\xff\xd8\xff\xe0\0\x02nonsense",
        b"\xff\xd8" + b"\xff" * (MAX_SEGMENTS + 9), jpeg(*[(0xE2, b"")] * MAX_SEGMENTS),
        webp(*[(b"ANMF", b"")] * MAX_SEGMENTS), b"RIFF\0\0\0\0WEBPEXIF\xff\xff\xff\xff",
        b"RIFF\0\0\0\0WEBPXMP \0\x10\0\0x",
        b"RIFF\0\0\0\0WEBPEXIF" + struct.pack("<I", MAX_CHUNK + 1),
        webp((b"XMP ", b"\xff\xfe")), jpeg((0xE1, b"http://ns.adobe.com/xap/1.0/\0\xff")),
    ],
    ids=range(13),
)  # fmt: skip
def test_broken_files_are_one_line(tmp_path: Path, data: bytes) -> None:
    refused(read_texts, placed(tmp_path / "x", data))


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_gives_the_recipe_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    suffix = data.draw(st.sampled_from(OTHERS))
    raw = bytearray(encode(PIXELS, RECIPE, suffix))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = placed(tmp_path_factory.getbasetemp() / f"mutant{suffix}", bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        recipe_from_png(path)
    except ModelError as error:
        assert str(error).isprintable() and len(str(error)) <= 300


def test_of_many_blocks_the_first_is_read_and_no_other_kept(tmp_path: Path) -> None:
    """640 MB of EXIF in a sparse JPEG, and 80 blocks of 8 MB in a WebP: far below 300 MB."""
    import tracemalloc

    xmp = b"http://ns.adobe.com/xap/1.0/\0first"
    path = placed(tmp_path / "x.jpg", b"\xff\xd8\xff\xe1" + struct.pack(">H", len(xmp) + 2) + xmp)
    with path.open("r+b") as file:
        file.seek(0, io.SEEK_END)
        for _ in range(9_000):
            file.write(b"\xff\xe1\xff\xff" + xmp[:-5])
            file.seek(65_535 - 2 - len(xmp[:-5]), io.SEEK_CUR)
        file.write(b"\xff\xda\0\2")
    many = placed(tmp_path / "x.webp", webp((b"XMP ", b"first")))
    with many.open("r+b") as file:
        file.seek(0, io.SEEK_END)
        for _ in range(80):
            file.write(struct.pack("<4sI", b"XMP ", MAX_CHUNK))
            file.seek(MAX_CHUNK, io.SEEK_CUR)
        file.truncate(file.tell())
    tracemalloc.start()
    for each in (path, many):
        assert read_texts(each) == {XMP_KEY: "first"}
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    print(f"{path.stat().st_size / 1e6:,.0f} and {many.stat().st_size / 1e6:,.0f} MB of blocks: {peak:.1f} MB")
    assert peak < 10


def test_claimed_sizes_are_not_believed(tmp_path: Path) -> None:
    """A WebP of 16383 x 16383 and a JPEG of 65535 x 65535, of a hundred bytes each, with a recipe all the same."""
    xmp = XMP.replace("</rdf:Description>", f"<qwenimg:recipe>{json.dumps(RECIPE)}</qwenimg:recipe></rdf:Description>")
    head = b"\x10\0\0\0" + (16_382).to_bytes(3, "little") * 2
    big = placed(
        tmp_path / "x.webp", webp((b"VP8X", head), (b"VP8L", b"\x2f\xff\xff\xff\xff"), (b"XMP ", xmp.encode()))
    )
    frame = struct.pack(">BHHB", 8, 65_535, 65_535, 3) + b"\1\x11\0\2\x11\0\3\x11\0"
    wide = placed(tmp_path / "x.jpg", jpeg((0xC0, frame), (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp.encode())))
    assert recipe_from_png(big) == recipe_from_png(wide) == RECIPE
    assert XMP_KEY in read_texts(big)


def test_quotes_that_another_program_wrote_as_entities(tmp_path: Path) -> None:
    text = json.dumps(RECIPE).replace('"', "&quot;")
    data = jpeg((0xE1, b"http://ns.adobe.com/xap/1.0/\0<x><qwenimg:recipe>" + text.encode() + b"</qwenimg:recipe></x>"))
    assert recipe_from_png(placed(tmp_path / "x.jpg", data)) == RECIPE
