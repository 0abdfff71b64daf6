"""A Z-Image folder that mflux saved: its names for some layers, strings only.

mflux has the published configurations alone, so a folder without them means these; nothing in it tells Turbo from the
base model but its name.
"""

from __future__ import annotations

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.denoisers import zimage_dit
from qwenimg.common.networks.encoders import qwen3
from qwenimg.common.parts import mflux
from qwenimg.common.weights.keys import Rename

SIGNS = ("t_embedder.linear1.", "t_embedder.linear2.", "all_final_layer.2-1.adaLN_modulation.0.")
_TRANSFORMER = (
    ("t_embedder.linear1.", "t_embedder.mlp.0."),
    ("t_embedder.linear2.", "t_embedder.mlp.2."),
    ("all_final_layer.2-1.adaLN_modulation.0.", "all_final_layer.2-1.adaLN_modulation.1."),
)


def transformer(manifest: Manifest) -> Rename:
    """Return the function that renames keys of diffusers or mflux to those of the manifest."""

    def rename(key: str) -> str:
        ours = next((new + key.removeprefix(old) for old, new in _TRANSFORMER if key.startswith(old)), key)
        return zimage_dit.rename(ours)

    return rename


def text_encoder(manifest: Manifest) -> Rename:
    """Return the function that renames keys, which mflux leaves as they are."""
    return qwen3.rename


RENAMES = {"transformer": transformer, "text_encoder": text_encoder, "vae": mflux.vae}
