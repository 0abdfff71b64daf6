"""Folders of pictures to learn from: captions in every form, sizes, and hostile files, each refused in one line."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.refusals import refused

from qwenimg.common.base.errors import QwenimgError, UsageError
from qwenimg.common.training import buckets
from qwenimg.common.training.folder import read_folder, split, table


def picture(
    path: Path, width: int = 80, height: int = 64, *, orientation: int | None = None, color: str = "red"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.new("RGB", (width, height), "red").save(path, exif=exif)
    return path


def captions(folder: Path, word: str = "", **options: bool) -> dict[str, str]:
    return {one.path.name: one.caption for one in read_folder(folder, word, **options).pictures}


def test_captions_in_every_form(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("\ufeffa red\n  square \n", encoding="utf-8")
    picture(tmp_path / "b.JPG")
    picture(tmp_path / "c.webp")
    picture(tmp_path / "._a.png")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "c.webp", "text": "ein rotes Quadrat"}) + "\n\n")
    picture(tmp_path / "3_sks dog" / "d.png")
    picture(tmp_path / "3_sks dog" / "e.png")
    (tmp_path / "3_sks dog" / "e.txt").write_text("own words")
    folder = read_folder(tmp_path, "sks")
    assert captions(tmp_path, "sks") == {
        "a.png": "a red square",
        "b.JPG": "sks",
        "c.webp": "ein rotes Quadrat",
        "d.png": "sks dog",
        "e.png": "own words",
    }
    assert folder.taken == 3 + 2 * 3
    lines = table(folder, {one.path: (64, 64) for one in folder.pictures}, "sks")
    print("\n".join(lines))
    text = "\n".join(lines)
    assert "pictures: 5, 9 in a round" in text and "captions without 'sks': 3" in text
    assert "words of its name are unused where pictures have captions (1)" in text and "caption of their own: 2" in text


def test_a_turned_photo_has_the_size_that_is_seen(tmp_path: Path) -> None:
    picture(tmp_path / "a.jpg", 80, 64, orientation=6)
    [one] = read_folder(tmp_path, "x").pictures
    assert one.size == (64, 80)


def test_pairs(tmp_path: Path) -> None:
    picture(tmp_path / "target" / "a.png")
    (tmp_path / "target" / "a.txt").write_text("make it night")
    picture(tmp_path / "source" / "a.jpg")
    [one] = read_folder(tmp_path, pairs=True).pictures
    assert (one.caption, one.source) == ("make it night", tmp_path / "source" / "a.jpg")
    assert "edits no picture" in refused(read_folder, tmp_path)
    (tmp_path / "source" / "a.jpg").unlink()
    assert "has no source picture" in refused(read_folder, tmp_path, pairs=True)


def test_held_out_pictures_are_spread(tmp_path: Path) -> None:
    for i in range(10):
        picture(tmp_path / f"{i}.png")
    rest, held = split(read_folder(tmp_path, "x"), 2)
    assert [one.path.stem for one in held.pictures] == ["2", "7"] and len(rest.pictures) == 8
    with pytest.raises(UsageError, match="--hold-out is 10"):
        split(read_folder(tmp_path, "x"), 10)


# Hostile folders


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _metadata(*rows: object) -> Callable[[Path], object]:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return _write("metadata.jsonl", text.encode("utf-8", "surrogatepass"))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a caption of 1 MB": (_write("a.txt", b"x" * (1 << 20)), "1,048,576 bytes"),
    "a caption in Latin-1": (_write("a.txt", "grün".encode("latin-1")), "is not UTF-8 (byte 2)"),
    "a caption in UTF-16": (_write("a.txt", "green".encode("utf-16")), "is not UTF-8 (byte 0)"),
    "a caption with ESC": (_write("a.txt", b"a \x1b[31m cat"), "which is no text"),
    "a caption with NUL": (_write("a.txt", b"a\0b"), "which is no text"),
    "a caption with a LoRA's tag": (_write("a.txt", b"<lora:x:1>"), "tag"),
    "a caption that is a pipe": (lambda folder: os.mkfifo(folder / "a.txt"), "pipe"),
    "a picture that is a pipe": (lambda folder: os.mkfifo(folder / "b.png"), "pipe"),
    "a picture that is a text": (_write("b.png", b"hello"), "is no PNG"),
    "a picture cut short": (_write("b.png", b"\x89PNG\r\n\x1a\n"), "b.png"),
    "a link to nothing": (lambda folder: (folder / "b.png").symlink_to("nowhere"), "does not exist"),
    "a link to itself": (lambda folder: (folder / "b.png").symlink_to("b.png"), "b.png"),
    "a link to a folder": (lambda folder: (folder / "5_x").symlink_to(folder), "is a link to a folder"),
    "too many repeats": (lambda folder: picture(folder / "9999_x" / "a.png"), "asks for 9999 repeats"),
    "metadata that is no JSON": (_metadata("{"), "line 1"),
    "metadata that is a list": (_metadata([1]), "is not a JSON object"),
    "metadata with a path up": (_metadata({"file_name": "../a.png", "text": "x"}), "is not the name of a picture"),
    "metadata with an absolute path": (_metadata({"file_name": "/etc/passwd", "text": "x"}), "is not the name"),
    "metadata with a number": (_metadata({"file_name": "a.png", "text": 3}), "its text is 3"),
    "metadata for no file": (_metadata({"file_name": "z.png", "text": "x"}), "names z.png, which is no file here"),
    "metadata twice": (_metadata(*[{"file_name": "a.png", "text": "x"}] * 2), "a second time"),
    "metadata deeper than it is": (_metadata('{"file_name":"a.png","text":' + "[" * 99 + "]" * 99 + "}"), "nested"),
    "metadata with half a character": (_metadata('{"file_name":"a.png","text":"\\ud800"}'), "line 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders(name: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    make, words = HOSTILE[name]
    make(tmp_path)
    assert words in refused(read_folder, tmp_path, "x")


def test_folders_without_pictures(tmp_path: Path) -> None:
    assert "holds no picture" in refused(read_folder, tmp_path)
    assert "no such folder" in refused(read_folder, tmp_path / "no")
    assert "is a file" in refused(read_folder, picture(tmp_path / "a.png"))
    with pytest.raises(UsageError, match=r"a.png: no caption; write a.txt, or give --word"):
        read_folder(tmp_path)
    picture(tmp_path / "big.png", 7000, 6000)
    assert "7000x6000" in refused(read_folder, tmp_path, "x")


def test_two_captions_of_one_picture(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    _metadata({"file_name": "a.png", "text": "y"})(tmp_path)
    assert "is a second caption of a.png" in refused(read_folder, tmp_path)


def test_random_bytes_of_metadata_and_captions_are_read_or_refused(tmp_path: Path) -> None:
    """Never another error, and never a path out of the folder."""
    made, good = random.Random(5), json.dumps({"file_name": "a.png", "text": "x"}).encode()
    picture(tmp_path / "a.png")
    for _ in range(300):
        raw = bytearray(good)
        for _ in range(made.randint(1, 4)):
            raw[made.randrange(len(raw))] = made.randrange(256)
        (tmp_path / made.choice(["metadata.jsonl"])).write_bytes(bytes(raw))
        try:
            found = read_folder(tmp_path, "word")
            assert all(one.path.parent == tmp_path for one in found.pictures)
        except QwenimgError as error:
            assert str(error).isprintable()


# Sizes


@pytest.mark.parametrize("side", [128, 256, 512, 1024])
def test_buckets_have_the_area_and_nearly_the_proportions(side: int) -> None:
    made = np.random.default_rng(side)
    worst_area, worst_ratio, unit = 0.0, 0.0, buckets.unit(side)
    for width, height in made.integers(side // 2, 4 * side, (400, 2)):
        if max(width / height, height / width) > 3:
            continue
        wide, high = buckets.bucket((int(width), int(height)), side)
        assert wide % unit == high % unit == 0 and wide <= width and high <= height
        area = min(side * side, int(width) * int(height))
        assert wide * high <= 1.1 * area
        worst_area = max(worst_area, 1 - wide * high / area)
        worst_ratio = max(worst_ratio, abs(np.log(wide / high * height / width)))
    print(f"{side}: area short by {worst_area:.0%} at most, proportions off by {worst_ratio:.2f}")
    assert worst_area < (0.45 if side == 128 else 0.3) and worst_ratio < 0.35


def test_nothing_is_enlarged_unasked() -> None:
    assert buckets.bucket((200, 150), 1024) == (192, 128)
    assert buckets.bucket((200, 150), 1024, enlarge=True) == (1152, 864)
    assert buckets.bucket((1024, 1024), 1024) == (1024, 1024)
    with pytest.raises(UsageError, match="less than 64 a side"):
        buckets.bucket((60, 500), 1024)
