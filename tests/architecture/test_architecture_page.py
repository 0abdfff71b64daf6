"""docs/architecture.md is what `python tools/write_architecture.py` writes, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import write_architecture
from support.rules import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    found = re.findall(f"<!-- begin {name} -->\n(.*?)\n<!-- end {name} -->", PAGE, re.DOTALL)
    assert len(found) == 1, name
    return found[0]


@pytest.mark.parametrize("name", ["picture", "rooms", "faces"])
def test_the_page_is_what_the_command_writes(name: str) -> None:
    assert block(name) == write_architecture.blocks()[name], "run `python tools/write_architecture.py`"


@pytest.mark.sample(0)
def test_every_room_has_a_row_and_a_sentence() -> None:
    rooms = {path.name for path in (ROOT / "common").iterdir() if (path / "__init__.py").exists()}
    assert {room for layer in write_architecture.layers() for room in layer} == rooms
    assert all(f"| `{room}` |" in write_architecture.rooms() for room in rooms)
    assert all(write_architecture.sentence(room).endswith(".") for room in rooms)


def test_uses_point_downwards() -> None:
    """A room uses rooms of lower layers alone: what import-linter holds is what the table shows."""
    level = {room: height for height, layer in enumerate(write_architecture.layers()) for room in layer}
    found = [(room, other) for room in level for other in write_architecture.uses(room)]
    print(len(found), "arrows between rooms")
    assert len(found) > 30 and all(level[room] < level[other] for room, other in found)


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md"])
def test_what_the_page_names_is_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:common|backends|cli|tests|tools|docs|src)/[\w./{},-]*)`", text))
    missing = [name for name in names if "X" not in name and not all(map(Path.exists, expanded(name)))]
    assert names and missing == []


def expanded(name: str) -> list[Path]:
    """`a/{b,c}.py` is a/b.py and a/c.py."""
    before, brace, rest = name.partition("{")
    inner, _, after = rest.partition("}")
    return [ROOT / f"{before}{part}{after}" for part in inner.split(",")] if brace else [ROOT / name]
