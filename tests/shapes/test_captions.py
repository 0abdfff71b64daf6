"""Captions of the grid: Chinese where this machine has a font for it, English where it has none."""

from __future__ import annotations

from pathlib import Path

import fonts
import numpy as np
import pytest
from PIL import ImageFont

from qwenimg.common.pictures.labelled_sheet import SheetTile, _wrapped, sheet
from qwenimg.common.shapes import captions
from qwenimg.common.shapes.gate import gate_prompts
from qwenimg.common.shapes.words import parse

LATIN = next(Path("/usr/share/fonts").rglob("DejaVuSans.ttf"), None) if Path("/usr/share/fonts").is_dir() else None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("三个粉红色的爱心", "three pink hearts"),
        ("一个橙色的十字在左边", "an orange cross on the left"),
        ("两个小的十字", "two small crosses"),
        ("白色背景上的一个红色的圆", "a red circle on a white background"),
        ("红色的圆在蓝色的星星的左边", "a red circle left of a blue star"),
        ("红色的圆和蓝色的星", "a red circle and a blue star"),
        ("一颗星位于上方", "a star at the top"),
        ("猫", None),
    ],
)
def test_english(prompt: str, expected: str | None):
    assert captions.english(parse(prompt)) == expected


def test_english_asks_for_the_same():
    for one in gate_prompts():
        told = captions.english(one.wanted)
        assert told is not None and parse(told) == one.wanted, (one.prompt, told)


def test_no_font_where_there_is_none(tmp_path: Path):
    (tmp_path / fonts.FONTS[0]).write_bytes(b"no font")
    assert fonts.font_for("圆", [tmp_path, tmp_path / "missing"]) is None
    assert fonts.font_for("圆", []) is None


@pytest.mark.skipif(LATIN is None, reason="this machine has no font whose letters are known")
def test_a_font_without_the_letters_is_not_used(tmp_path: Path):
    """A Latin font under the name of a Chinese one."""
    assert LATIN is not None
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / fonts.FONTS[0]).symlink_to(LATIN)
    assert fonts.font_for("a red circle", [tmp_path]) is not None
    assert fonts.font_for("圆", [tmp_path]) is None


def test_whatever_font_is_found_has_the_letters():
    font = fonts.font_for("一个红色的圆")
    print(font and font.path)
    if font is not None:
        assert fonts.has_all(font, "一个红色的圆")
        page = sheet([SheetTile(pixels=np.full((16, 16, 3), 128, np.uint8), lines=("一个红色的圆" * 9,))], 1, 128, font)
        assert page.std() > 0


def test_lines_break_between_chinese_characters():
    font = ImageFont.load_default()

    class Wide:
        def getlength(self, text: str) -> float:
            return 10.0 * len(text)

    assert _wrapped(["一个红色的圆，白色背景"], 50, Wide()) == ["一个红色的", "圆，白色背", "景"]
    assert _wrapped(["a red circle 圆圆圆"], 60, Wide()) == ["a red", "circle", "圆圆圆"]
    assert _wrapped(["a red circle on the left"], 60, font)[0].startswith("a red")
