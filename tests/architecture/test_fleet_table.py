"""The table of docs/fleet.md is what `python tools/write_fleet.py` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_fleet as tool
from support.rules import ROOT


def test_the_page_has_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    text = (ROOT / "docs" / tool.PAGE).read_text(encoding="utf-8")
    [block] = re.findall(f"<!-- begin {tool.BLOCK} -->\n(.*?)\n<!-- end {tool.BLOCK} -->", text, re.DOTALL)
    assert block == tool.text(), "run `python tools/write_fleet.py`"


def test_numbers_have_two_digits() -> None:
    assert [tool._digits(count) for count in (0.756, 9.94, 12.4, 51234.0, 4.1e6)] == [
        "0.8", "9.9", "12", "51,000", "4,100,000",
    ]  # fmt: skip
