"""What a Python caller may give: a value of another kind, which the command line cannot give, is told in one line."""

from __future__ import annotations

import os

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean


def check_texts(**given: object) -> None:
    """Raises UsageError unless each value is a text."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} is {clean(value, 40)}; expected a text")


def check_paths(**given: object) -> None:
    """Raises UsageError unless each value is a text, a path of texts, or None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, str) and not _is_path(value):
            raise UsageError(f"{name} is {clean(value, 40)}; expected a text or a path")


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike) and isinstance(os.fspath(value), str)
