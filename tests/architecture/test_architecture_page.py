"""docs/architecture.md has the rooms on the floors where the contracts put them, and what it names is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from support.rules import ROOT


def test_the_page_has_the_rooms_of_the_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    [order] = [one for one in contracts if one.get("containers") == ["qwenimg.common"]]
    [forbidden] = [
        one["forbidden_modules"] for one in contracts if "qwenimg.backends.torch.ops" in one.get("source_modules", ())
    ]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d*) ?\| `(\w+)`(\*?) \|", page, re.MULTILINE)
    floors = list[list[str]]()
    for floor, room, star in rows:
        floors += [[]] if floor else []
        floors[-1].append(room)
        assert bool(star) != (f"qwenimg.common.{room}" in forbidden), room
    assert floors == [layer.split(" | ") for layer in order["layers"]]
    assert [floor for floor, _, _ in rows if floor] == [str(i) for i in reversed(range(len(floors)))]


@pytest.mark.parametrize("page", ["adding.md", "architecture.md", "contributing.md"])
def test_what_the_page_names_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:common|backends|cli|tests|tools|docs|src)/[\w./{},-]*)`", text))
    missing = [name for name in names if "X" not in name and not all(map(Path.exists, expanded(name)))]
    assert names and missing == []


def expanded(name: str) -> list[Path]:
    """Return a/b.py and a/c.py for `a/{b,c}.py`."""
    before, brace, rest = name.partition("{")
    inner, _, after = rest.partition("}")
    return [ROOT / f"{before}{part}{after}" for part in inner.split(",")] if brace else [ROOT / name]
