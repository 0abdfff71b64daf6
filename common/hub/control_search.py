"""Search for a control network on this machine by the user's name for it."""

from __future__ import annotations

import os
from pathlib import Path

from qwenimg.common.base.amounts import size_text
from qwenimg.common.base.arguments import home
from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.hf_cache import cache_folder, find_cached, is_offline
from qwenimg.common.base.safe_files import kind
from qwenimg.common.base.text import clean
from qwenimg.common.families import catalog
from qwenimg.common.hub.model_folders import ModelFolders


def named_control(name: str) -> Path | None:
    """Return the folder or file of the control network that a recipe calls `name`, if the cache has it: a path in a
    recipe is never opened."""
    known = next((piece for piece in catalog.CONTROLS if name == piece.name), None)
    return None if os.path.lexists(name) else find_cached(known.repo if known else name)


def find_control(name: str, folders: ModelFolders) -> Path:
    """Return the folder or file of the control network `name`: a path, a known name, a hub id or a file of one in the
    cache, or a name in the folders of --models-dir. Raises ModelError."""
    path = Path(home(name))
    if os.path.lexists(path) or kind(path) is not None:
        return path
    known = next((piece for piece in catalog.CONTROLS if name.lower() in (piece.name, piece.repo.lower())), None)
    if (cached := find_cached(known.repo if known else name)) is not None:
        return cached
    if known is None and (place := folders.locate(name, "control")) != name:
        return Path(place)
    shown = clean(name, 80)
    if known is None and "/" not in name:
        names = ", ".join(piece.name for piece in catalog.CONTROLS)
        raise ModelError(f"--control {shown}: no such file or folder; known by name are {names}")
    size = f" ({size_text(known.bytes)}, {known.license})" if known else ""
    when = " with the network on" if is_offline() else ""
    where = clean(cache_folder(), 80)
    raise ModelError(f"--control {shown}: is not in the cache {where}; get it{size}{when} by: qwenimg pull {shown}")
