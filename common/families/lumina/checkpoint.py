"""Rows from which a Lumina-Image 2.0 is opened: its networks, and what its parts must fit."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.lumina.known import SMALL_FILES
from qwenimg.common.families.opening import Opening
from qwenimg.common.networks.denoisers import lumina_dit, lumina_names
from qwenimg.common.networks.encoders import language_names
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.prompts import language

NETWORKS: dict[str, Network] = {
    "transformer": lumina_dit.NETWORK,
    # its states are taken in front of the last layer; no file of a model states that
    "text_encoder": replace(language_names.GEMMA_2.network, stated={"taps": (-2,)}),
    "vae": kl_vae.NETWORK,
}
LAYOUTS = {
    "transformer": lumina_names.LAYOUTS,
    "text_encoder": language_names.GEMMA_2,
    "vae": kl_vae_names.LAYOUTS,
}
FITS = (
    fits.text_states(
        lambda configs: configs["text_encoder"].state_size, lambda configs: configs["transformer"].cap_feat_dim
    ),
    fits.LATENTS,
)


OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: "lumina",  # all have the same configurations
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES, language.load),
)
