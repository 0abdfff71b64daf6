"""Checks of a Python caller's values: a wrong type, which the command line cannot pass, is refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

from qwenimg.common.base.errors import UsageError
from qwenimg.common.base.text import clean

LONGEST = 1e15  # seconds of a run


def check_texts(**given: object) -> None:
    """Raise UsageError unless each value is a text."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} is {clean(value, 40)}; expected a text")


def check_paths(**given: object) -> None:
    """Raise UsageError unless each value is a text, a path of texts, or None."""
    for name, value in given.items():
        if value is not None and not (isinstance(value, str) and value) and not _is_path(value):
            raise UsageError(f"{name} is {shown(value)}; expected a text or a path")


def check_flags(**given: object) -> None:
    """Raise UsageError unless each value is True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name} is {shown(value)}; expected True or False")


def check_functions(**given: object) -> None:
    """Raise UsageError unless each value is a function or None."""
    for name, value in given.items():
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise UsageError(f"{name} is {shown(value)}; expected a function or None")


def check_seconds(**given: object) -> None:
    """Raise UsageError unless each value is a number from 0 to LONGEST."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
            raise UsageError(f"{name} is {shown(value)}; expected a number of seconds")


def paths(name: str, value: object) -> list[str | os.PathLike[str]]:
    """Return the paths of an argument that takes one, a list of them, or None. Raises UsageError."""
    several = [value] if isinstance(value, str) or _is_path(value) else [] if value is None else value
    if not isinstance(several, list | tuple):
        raise UsageError(f"{name} is {shown(value)}; expected a path or a list of paths")
    for one in several:
        if one is None:
            raise UsageError(f"{name} holds None; expected a path or a list of paths")
        check_paths(**{name: one})
    return list(several)


def texts(name: str, value: object) -> list[str] | tuple[str, ...]:
    """Return `value`, a list or tuple of texts. Raises UsageError for anything else."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{name} is {shown(value)}; expected a list of texts")
    return value


def shown(value: object) -> str:
    """Return `value` for a message, in at most 40 characters, a text in quotes."""
    return repr(clean(value, 38)) if isinstance(value, str) else clean(value, 40)


def path_text(value: object) -> str | None:
    """Return `value` if it is a text, or the text of a path; None for anything else."""
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except TypeError:  # its class returns neither a text nor bytes
        return None
    return path if isinstance(path, str) else None


def _is_path(value: object) -> bool:
    return isinstance(value, os.PathLike) and path_text(value) is not None


def home(path: str | Path) -> str:
    """Return `path` with `~` or `~user` at its start as that user's folder; as it is if there is no such user."""
    try:
        return os.path.expanduser(path)  # noqa: PTH111 (Path.expanduser raises for a user who does not exist)
    except ValueError:  # a null byte; whoever opens it says so
        return str(path)
