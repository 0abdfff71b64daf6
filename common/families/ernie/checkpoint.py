"""Rows from which an ERNIE-Image is opened: its networks, and the published model that one without configurations is
like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qwenimg.common.base.hf_cache import display_name
from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.ernie.known import SMALL_FILES, TURBO, of_name
from qwenimg.common.families.known_model import KnownModel
from qwenimg.common.families.opening import Opening, Source
from qwenimg.common.networks.denoisers import ernie_dit, ernie_names
from qwenimg.common.networks.encoders import language_names
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import flux2_vae, flux2_vae_names
from qwenimg.common.prompts import language

VARIANCE_EPS = 1e-5
"""The pipeline adds so much to the variances of latents, as in training; the published configuration has FLUX.2's
1e-4."""


NETWORKS: dict[str, Network] = {
    "transformer": ernie_dit.NETWORK,
    # its states are taken in front of the last layer; no file of a model states that
    "text_encoder": replace(language_names.MINISTRAL_3.network, stated={"taps": (-2,)}),
    "vae": flux2_vae.NETWORK,
}
LAYOUTS = {
    "transformer": ernie_names.LAYOUTS,
    "text_encoder": language_names.MINISTRAL_3,
    "vae": flux2_vae_names.LAYOUTS,
}
FITS = (
    fits.text_states(
        lambda configs: configs["text_encoder"].state_size, lambda configs: configs["transformer"].text_in_dim
    ),
    fits.patches(lambda configs: configs["vae"].patch_channels),
)


def known_of(source: Source) -> KnownModel:
    """Return the known model that a model is of, by the name of its transformer's file, or its own."""
    return of_name(display_name(source.given.get("transformer", source.path)))


def _config(source: Source, part: str, config: Any) -> Any:
    return replace(config, batch_norm_eps=VARIANCE_EPS) if part == "vae" and not source.has_tiny_vae else config


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: known_of(source).name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES, language.load),
    config=_config,
    complete=lambda source, checkpoint: replace(checkpoint, distilled=known_of(source) is TURBO),
)
