"""Small facts about this machine that the program keeps for itself, such as its speed: numbers in JSON files.

They are a convenience: a file that is missing, broken or not writable is the same as none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from qwenimg.common.base.atomic_files import make_folder, write_atomic
from qwenimg.common.base.config import read_json
from qwenimg.common.base.errors import QwenimgError

MOST = 200  # facts of a file; the oldest are dropped


def folder() -> Path:
    """Return the folder: in XDG_CACHE_HOME, else in ~/.cache. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qwenimg"


def number(file: str, name: str) -> float | None:
    """Return the positive number that is kept under `name`, or None."""
    value = _read(file).get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e30 else None  # type: ignore[operator, arg-type]


def keep(file: str, values: Mapping[str, float]) -> None:
    """Store numbers by name in `file`, next to those already there."""
    with suppress(QwenimgError, OSError, RuntimeError, ValueError):
        old = {name: value for name, value in _read(file).items() if name not in values}
        data = dict([*old.items(), *values.items()][-MOST:])
        make_folder(folder(), parents=True)
        write_atomic(folder() / file, json.dumps(data, indent=0).encode(), overwrite=True)


def _read(file: str) -> dict[str, object]:
    try:
        return read_json(folder() / file)
    except (QwenimgError, OSError, RuntimeError, ValueError):
        return {}
