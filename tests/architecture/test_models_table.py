"""The table of known models in docs/models.md: what `python tools/write_models.py` writes."""

from __future__ import annotations

import re

import pytest
import write_models as tool
from doc_tables import DOCS, table

from qwenimg.common.families.catalog import KNOWN
from qwenimg.common.families.part_file import ModelFile
from qwenimg.common.families.registry import FAMILIES
from qwenimg.common.hub.forecast import NO_MODELS


def test_no_model_asks_for_less_memory_than_its_plan() -> None:
    """What `pull` and `models` say is rounded, but never by more than a tenth of a GB below the page's plan."""
    page = (DOCS / tool.PAGE).read_text(encoding="utf-8")
    planned = dict(re.findall(r"^\| `([^`]+)` \|(?:[^|]*\|){4} ([0-9.]+) GB \|", page, re.MULTILINE))
    assert len(planned) > 20
    assert [name for name, peak in planned.items() if KNOWN[name].memory < (float(peak) - 0.1) * 1e9] == []


@pytest.mark.sample(0)
def test_the_page_has_the_table_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    page = (DOCS / tool.PAGE).read_text(encoding="utf-8")
    [block] = re.findall(f"<!-- begin {tool.BLOCK} -->\n(.*?)\n<!-- end {tool.BLOCK} -->", page, re.DOTALL)
    rows = tool.rows()
    assert block == table(tool.HEADS, rows), "run: python tools/write_models.py"
    assert {row[0].strip("`") for row in rows} | set(NO_MODELS) == KNOWN.keys()


def test_the_page_has_a_row_of_each_family() -> None:
    """With the files that it reads besides, and its precisions. ERNIE-Image, Krea 2 and Anima had none."""
    page = (DOCS / tool.PAGE).read_text(encoding="utf-8")
    [rows] = re.findall(r"\| family \| files besides .*\n(?:\|.*\n)+", page)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
    for family in FAMILIES:
        title = family.title.lower()
        own = [row for row in cells if row[0].lower().startswith(title)]
        own = [row for row in own if row[0][len(title) : len(title) + 1] in ("", ",", " ", "1", "-")]
        assert own, f"{family.title} has no row"
        files = ", ".join(row[1] for row in own)
        assert ("mflux" in files) == bool(family.networks[0].mflux_signs) or title == "flux.2 dev", family.title
        if family.name != "stable-diffusion":
            merged = any(isinstance(one, ModelFile) for one in family.files)
            assert ("merged" in files or "single files" in files) == merged, family.title
        takes_half = not {"fp16", "float16"} & set(family.precision.refused)
        assert any("all" in row[2] or "`fp16`" in row[2] for row in own) == takes_half, family.title
