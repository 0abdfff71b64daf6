"""Names of the files of a picture in layers."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.atomic_files import JPEG
from qwenimg.common.base.errors import UsageError

FIELD = "{layer}"


def named(path: Path, layer: object) -> Path:
    """Return the name of a layer's file: `path` with the number `layer` in place of {layer}, else before the suffix."""
    if FIELD in str(path):
        return Path(str(path).replace(FIELD, str(layer)))
    return path.with_name(f"{path.stem}-{layer}{path.suffix}")


def check(suffix: str) -> None:
    """Raise UsageError for the suffix of a JPEG, which has no alpha."""
    if suffix.lower() in JPEG:
        raise UsageError("layers are transparent in parts, a JPEG is not; write .png or .webp")


def numbered(path: Path, count: int) -> list[Path]:
    """Return the names of the files of `count` layers, from 0. Raises UsageError for a JPEG."""
    check(path.suffix)
    return [named(path, i) for i in range(count)]
