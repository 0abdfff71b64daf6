"""Writes common/request/asked.py, the keywords of a call of a pipeline, which type checkers and editors read.

python tools/write_asked.py
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from qwenimg.common.request.request import OPTIONS, Request

FILE = Path(__file__).resolve().parent.parent / "common" / "request" / "asked.py"
HEAD = '''\
"""The keywords of a call of a pipeline, for type checkers and editors.

Written by tools/write_asked.py from the fields of `Request`: a type checker reads this and runs nothing.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.request.given import Loras, Picture


class Asked(TypedDict, total=False):
    """What a call may say besides the prompt. None takes the model's default, and a seed by chance."""

'''


def text() -> str:
    plain = {field.name: str(field.type).removesuffix(" | None") for field in fields(Request)}
    types = {name: OPTIONS[name].python or kind for name, kind in plain.items()}
    return HEAD + "".join(f"    {name}: {kind} | None\n" for name, kind in types.items() if name != "prompt")


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
