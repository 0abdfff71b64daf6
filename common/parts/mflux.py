"""A folder that mflux saved: parts with its names, quantized or not, and no configurations."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.safe_files import is_file, is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek

_NOTES = {"mflux_version": "mflux", "quantization_level": "level"}


def in_root(folder: Path) -> bool:
    """Return whether the shards of a transformer are in `folder`, that of the model, as mflux saves those that are
    published as one file there."""
    return is_file(folder / "model.safetensors.index.json") and not is_folder(folder / "transformer")


def layout(folder: Path, signs: tuple[str, ...]) -> str | None:
    """Return the layout of a folder whose transformer has a tensor that starts with one of `signs`, mflux's names, with
    that name; else None. Raises ModelError."""
    place = folder if in_root(folder) else folder / "transformer"
    if not is_folder(place):
        return None
    for path in find_files(place).files:
        header = peek(path)
        sign = next((key for key in header.tensors if key.startswith(signs)), None)
        if sign is not None:
            notes = [
                f"{word} {clean(header.metadata[key], 20)}" for key, word in _NOTES.items() if key in header.metadata
            ]
            return ", ".join([f"folder of mflux (its names, as {clean(sign, 80)})", *notes])
    return None
