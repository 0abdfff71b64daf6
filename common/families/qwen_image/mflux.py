"""A Qwen-Image folder that mflux saved: parts with its names, quantized or not, and no configurations.

mflux has the published configurations and scheduler alone, so a folder without them means these. It may lack a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import find_cached
from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import read_header
from qwenimg.common.parts.piece import QWEN_IMAGE_FILES

_BLOCK = "transformer_blocks.0."
_SIGNS = (f"{_BLOCK}img_mod_linear.", f"{_BLOCK}attn.attn_to_out.", f"{_BLOCK}img_ff.")
_NOTES = {"mflux_version": "mflux", "quantization_level": "level"}


def are_names(keys: Iterable[str]) -> bool:
    """Return whether `keys` are mflux's names for tensors of the transformer."""
    return any(key.startswith(_SIGNS) for key in keys)


def layout(folder: Path) -> str | None:
    """Return the layout of a folder whose transformer has mflux's names, with one of them; else None. Raises
    ModelError."""
    if not is_folder(folder / "transformer"):
        return None
    for path in find_files(folder / "transformer").files:
        header = read_header(path)
        header.file.close()
        sign = next((key for key in header.tensors if key.startswith(_SIGNS)), None)
        if sign is not None:
            notes = [
                f"{word} {clean(header.metadata[key], 20)}" for key, word in _NOTES.items() if key in header.metadata
            ]
            return ", ".join([f"folder of mflux (its names, as {clean(sign, 80)})", *notes])
    return None


def tokenizer(folder: Path, given: Path | None) -> Path:
    """Return the folder of the tokenizer: the one `given`, else that of `folder` or the hub's cache. Raises
    ModelError."""
    inside, piece = folder / "tokenizer", QWEN_IMAGE_FILES
    if given is not None:
        return given / "tokenizer" if is_folder(given / "tokenizer") else given
    path = inside if is_folder(inside) else find_cached(f"{piece.repo}/tokenizer")
    if path is None:
        raise ModelError(
            f"{clean(folder, 120)}: holds no tokenizer/, nor does the hub's cache: get it by qwenimg pull {piece.name} "
            f"({size_text(piece.bytes)}), or give --tokenizer FOLDER"
        )
    return path
