"""The tiny VAE that makes previews of a model: the one that is given, else the one of its name on this machine."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.safe_files import bad, closed_on_error
from qwenimg.common.families.load_options import LoadOptions
from qwenimg.common.families.registry import OpenModel
from qwenimg.common.hub.model_folders import ModelFolders
from qwenimg.common.hub.part_files import find_part, find_tiny_vae
from qwenimg.common.parts import tiny_vae, vae_files
from qwenimg.common.runtime.checkpoint import Component


def find_preview_vae(model: OpenModel, folders: ModelFolders, options: LoadOptions) -> Component | None:
    """Return the tiny VAE that makes previews, or None: the one that is given, else the one of the model's name in the
    folders of --models-dir or in the cache, if it is whole. Raises ModelError for a given one of other latents."""
    family, given = model.family, options.preview_with
    if family.tiny_vae is None:
        if given is not None:
            raise bad(given, f"makes no previews here: no tiny VAE is known for {family.title}")
        return None
    own, wanted = model.checkpoint["vae"], family.tiny_vae(model.checkpoint)
    if given is not None:
        return _opened(find_part(given), own, wanted)
    if tiny_vae.is_tiny(own):
        return None
    place = folders.find_tiny_vae(wanted) or find_tiny_vae(wanted)
    try:
        return None if place is None else _opened(place, own, wanted)
    except ModelError:  # nobody asked for it
        return None


def _opened(path: Path, own: Component, wanted: str) -> Component:
    """Open a tiny VAE of the model's latents. Raises ModelError."""
    part = vae_files.open_tiny(path, own.config)
    with closed_on_error(part.plan):
        tiny_vae.check(path, part, wanted)
    return part
