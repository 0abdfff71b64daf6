"""Links between the README and the pages of docs/ lead to a file, and to a heading where they name one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.rules import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of `page` as GitHub makes them: lower case, no punctuation, hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the links of `page` that lead nowhere."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    return [
        f"{path}#{anchor}" for path, anchor in targets if not path.exists() or (anchor and anchor not in anchors(path))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"({page.relative_to(ROOT)}" not in text] == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, and more\n[a](none.md) [b](#nowhere) [c](page.md#a-heading-and-more)\n", encoding="utf-8"
    )
    assert broken(page) == [f"{tmp_path / 'none.md'}#", f"{page}#nowhere"]


def test_every_table_that_a_command_writes_has_its_place() -> None:
    calls = [
        call
        for tool in sorted((ROOT / "tools").glob("*.py"))
        for call in re.findall(r'\bwrite\(\s*"([\w/]+\.md)",\s*"([\w-]+)"', tool.read_text(encoding="utf-8"))
    ]
    print(len(calls), "tables")
    lost = [
        (page, name)
        for page, name in calls
        if f"<!-- begin {name} -->" not in (ROOT / "docs" / page).read_text("utf-8")
    ]
    assert len(calls) > 15 and lost == []
