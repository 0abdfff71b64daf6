"""The table of ComfyUI's model files in docs/weights.md: what `python tools/write_comfyui_files.py` writes."""

from __future__ import annotations

import re

import write_comfyui_files as tool
from doc_tables import DOCS, table

EIGHT = (
    "qwen_image_2.1", "qwen_image_2.1_turbo", "qwen_image_edit_2509", "qwen_image_edit_2511", "z_image",
    "z_image_turbo", "qwen3vl_8b",
)  # fmt: skip


def test_the_page_has_the_table_of_the_command() -> None:
    page = (DOCS / "weights.md").read_text(encoding="utf-8")
    [block] = re.findall("<!-- begin comfyui -->\n(.*?)\n<!-- end comfyui -->", page, re.DOTALL)
    assert block == table(["read as", "files"], tool.rows()), "run: python tools/write_comfyui_files.py"


def test_every_name_has_one_verdict_and_no_rule_is_without_a_name() -> None:
    names = tool.LIST.read_text(encoding="utf-8").split()
    found = tool.verdicts()
    print(len(names), "files,", sum(name.find("convrot") > 0 for name in names), "in convrot")
    assert sorted(name for group in found.values() for name in group) == sorted(set(names)) == sorted(names)
    assert [verdict for verdict, group in found.items() if not group] == []


def test_files_of_our_families_in_convrot_are_read() -> None:
    read = {name for verdict in dict(map(reversed, tool.READ)) for name in tool.verdicts()[verdict]}
    assert {f"{name}_int8_convrot.safetensors" for name in EIGHT} <= {name.partition("/")[2] for name in read}
    assert tool.format_of("x/z_image_turbo_int8_convrot.safetensors") == "int8_convrot"
    assert tool.format_of("x/qwen_2.5_vl_7b.safetensors") == ""
