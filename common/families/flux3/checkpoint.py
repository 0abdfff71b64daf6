"""Rows from which a FLUX.3 Image Klein is opened: its networks, and the published model that one without
configurations is like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.flux3.known import BASE, KLEIN, SMALL_FILES
from qwenimg.common.families.opening import Opening
from qwenimg.common.networks.denoisers import flux3_dit, flux3_names
from qwenimg.common.networks.encoders import language_names, qwen
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, flux2_vae_names
from qwenimg.common.parts.open_file import stored_shape
from qwenimg.common.runtime.checkpoint import Checkpoint

TAPS = (4, 8, 12, 16, 20, 24, 28, 32)
"""The layers of the text encoder behind which states are taken. No file of a model states them."""


NETWORKS: dict[str, Network] = {
    "transformer": flux3_dit.NETWORK,
    "text_encoder": replace(qwen.QWEN3_VL, stated={"taps": TAPS, "pad_position": 1}),
    "vae": flux2_vae.NETWORK,
}
LAYOUTS = {
    "transformer": flux3_names.LAYOUTS,
    "text_encoder": language_names.QWEN3_VL,
    "vae": flux2_vae_names.LAYOUTS,
}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].state_size),
    fits.patches(lambda configs: configs["vae"].patch_channels),
)


def model_of(transformer: Path) -> str:
    """Return the name of the published model that the transformer in a folder or file is of: the distilled one if it
    takes the time that a step goes to. Raises ModelError."""
    layer = f"{flux3_dit.TARGET}.linear_1.weight"
    return (BASE if stored_shape(LAYOUTS["transformer"], transformer, layer) is None else KLEIN).name


def distilled(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that knows whether it is distilled, by its transformer."""
    return replace(checkpoint, distilled=checkpoint["transformer"].config.flow_map)


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: model_of(source.place("transformer")),
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
    complete=lambda source, checkpoint: distilled(checkpoint),
)
