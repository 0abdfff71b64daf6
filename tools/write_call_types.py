"""Writes the keywords that type checkers and editors show: of a call of a pipeline in common/request/call_types.py, and
of `qwenimg.load`, with their documentation, in src/qwenimg/__init__.py.

python tools/write_call_types.py
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from pathlib import Path

from qwenimg.common.families.load_options import LOAD_OPTIONS, LoadOptions
from qwenimg.common.request.family_options import FamilyOptions
from qwenimg.common.request.option import Option
from qwenimg.common.request.request import OPTIONS, Request

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "common" / "request" / "call_types.py"
LOAD = ROOT / "src" / "qwenimg" / "__init__.py"
POSITIONAL = ("model", "backend", "precision")  # of `qwenimg.load`
HEAD = '''\
"""The keywords of a call of a pipeline, for type checkers and editors.

Written by tools/write_call_types.py from the fields of `Request` and of `FamilyOptions`, for type checkers, which run
nothing.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from qwenimg.common.request.coerce import Controls, Embeddings, Loras, Picture, Pictures


class CallOptions(TypedDict, total=False):
    """Options of a call besides the prompt. None takes the model's default, or a random seed."""

'''


def text() -> str:
    plain = {one.name: str(one.type).removesuffix(" | None") for one in (*fields(Request), *fields(FamilyOptions))}
    types = {name: one.python or plain[one.field] for name, one in OPTIONS.items()}
    return HEAD + "".join(f"    {name}: {kind} | None\n" for name, kind in types.items() if name != "prompt")


# qwenimg.load

_LOAD = re.compile(r"def load\(\n.*?^    given = dict\(locals\(\)\)", re.DOTALL | re.MULTILINE)
_HEAD = '''\
def load(
{parameters}
) -> Pipeline:
    """Open a model on a backend; weights are read when they are first needed.

{options}
        notify: a function that takes (kind, text), for stages, warnings and notices.

    Raises QwenimgError; UnknownOption, a TypeError too, for other keywords. `with` closes it at the end."""
    given = dict(locals())'''


def load_text(before: str) -> str:
    """Return the text `before` of the package's `__init__.py` with the keywords of `load` as they are now."""
    named = [LOAD_OPTIONS[name] for name in (*POSITIONAL, *(name for name in LOAD_OPTIONS if name not in POSITIONAL))]
    types = {one.name: str(one.type) for one in fields(LoadOptions)}
    lines = [f"{one.name}: {one.python or types[one.name]} = {one.default!r},".replace("'", '"') for one in named]
    lines.insert(len(POSITIONAL), "*,")
    lines += ["notify: Callable[[str, str], None] | None = None,", "**unknown: Never,"]
    parameters = textwrap.indent("\n".join(lines), " " * 4)
    head = _HEAD.format(parameters=parameters, options="\n".join(map(_documented, named)))
    written, count = _LOAD.subn(lambda _: head, before)
    assert count == 1, LOAD
    return written


def _documented(one: Option) -> str:
    said = f"{one.name}: {one.format_help(one.call or one.help)}."
    return textwrap.fill(said, 120, initial_indent=" " * 8, subsequent_indent=" " * 12)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    LOAD.write_text(load_text(LOAD.read_text(encoding="utf-8")), encoding="utf-8")
