"""Names of files from prompts: letters of every script, always safe, never too long."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenimg.common.base.amounts import counted, size_text
from qwenimg.common.jobs.naming import slug

RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=[]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A red circle, on white!", "a-red-circle-on-white"),
        ("Café A\u030angstro\u0308m", "café-ångström"),
        ("一只戴帽子的猫，黑色背景", "一只戴帽子的猫-黑色背景"),
        ("Красный КРУГ", "красный-круг"),
        ("नीला तारा", "नीला-तारा"),
        ("دائرة حمراء", "دائرة-حمراء"),
        ("می\u200cخواهم", "میخواهم"),
        ("\u202eevil\u202c/..\\x", "evil-x"),
        ("👩‍🚀", "image"),
        ("", "image"),
        ("-rf ../../etc/passwd", "rf-etc-passwd"),
        (".hidden\0\x1b[31m", "hidden-31m"),
        ("CON", "image-con"),
        ("com1", "image-com1"),
        ("lone \udcff", "lone"),
        ("\u0301 mark", "mark"),
        ("word " * 40, "word-" * 15 + "word"),
        ("猫" * 40, "猫" * 26),
        ("x" * 3_000_000, "x" * 80),
        ("x" * 79 + "e\u0301\u0323 y", "x" * 79),
    ],
)
def test_slug(text: str, expected: str) -> None:
    assert slug(text) == unicodedata.normalize("NFC", expected)


@settings(max_examples=300)
@given(text=ANY_TEXT | st.sampled_from(sorted(RESERVED)), limit=st.integers(12, 90))
def test_slug_is_always_a_safe_name(text: str, limit: int) -> None:
    name = slug(text, limit)
    kinds = {unicodedata.category(c) for c in name if c != "-"}
    assert name and len(name.encode()) <= limit and not name.startswith("-") and not name.endswith("-")
    assert all(kind[0] in "LM" or kind == "Nd" for kind in kinds) and unicodedata.category(name[0])[0] != "M"
    assert name not in RESERVED and unicodedata.is_normalized("NFC", name) and slug(name, limit) == name


def test_a_file_system_without_such_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert slug("Café 猫") == "cafe" and slug("猫") == "image"
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert slug("Café") == "café"


def test_a_file_can_have_that_name(tmp_path: Path) -> None:
    name = slug("一只戴帽子的猫 " * 30)
    (tmp_path / f"{name}.png").touch()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1234, "1,234 steps")])
def test_counted(count: int, text: str) -> None:
    assert counted(count, "step") == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(57.7e9, "57.7 GB"), (1e9, "1.0 GB"), (0.05e9, "50.0 MB"), (3000, "3.0 kB"), (12, "12 bytes"), (1, "1 byte")],
)
def test_size_text(count: float, text: str) -> None:
    assert size_text(count) == text
