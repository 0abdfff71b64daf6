"""A Qwen-Image folder that mflux saved.

mflux has the published configurations and scheduler alone, so a folder without them means these. It may lack a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qwenimg.common.parts import mflux

_BLOCK = "transformer_blocks.0."
_SIGNS = (f"{_BLOCK}img_mod_linear.", f"{_BLOCK}attn.attn_to_out.", f"{_BLOCK}img_ff.")


def are_names(keys: Iterable[str]) -> bool:
    """Return whether `keys` are mflux's names for tensors of the transformer."""
    return any(key.startswith(_SIGNS) for key in keys)


def layout(folder: Path) -> str | None:
    """Return the layout of a folder whose transformer has mflux's names; else None. Raises ModelError."""
    return mflux.layout(folder, _SIGNS)
