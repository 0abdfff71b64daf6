"""Writes the table of AUTOMATIC1111's fields in docs/server.md.

python tools/write_sd_fields.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from doc_tables import table, write

from qwenimg.cli.serve.apis.sd_fields import BOTH, PICTURE, TEXT, FieldRow


def text() -> str:
    return table(("field", "what it does here"), [*rows(BOTH), *rows(TEXT), *rows(PICTURE[1:])])


def rows(fields: Sequence[FieldRow]) -> list[tuple[str, str]]:
    return [(", ".join(f"`{name}`" for name in row.names), row.done or _only(row)) for row in fields]


def _only(row: FieldRow) -> str:
    """The values that ask for nothing."""
    values = " or ".join(f"`{json.dumps(value)}`" for value in row.values)
    return f"{values}, others are refused{f'; {row.why}' if row.why else ''}"


if __name__ == "__main__":
    write("server.md", "sd-fields", text())
