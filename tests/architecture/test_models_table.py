"""The table of known models in docs/models.md: what `python tools/write_models.py` writes."""

from __future__ import annotations

import re

import pytest
import write_models as tool
from doc_tables import DOCS, table

from qwenimg.common.families.catalog import KNOWN
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
