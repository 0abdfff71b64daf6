"""Rows from which an Ovis-Image is opened."""

from __future__ import annotations

from dataclasses import replace

from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.opening import Opening
from qwenimg.common.families.ovis.known import IMAGE, SMALL_FILES
from qwenimg.common.networks.denoisers import ovis_dit, ovis_names
from qwenimg.common.networks.denoisers.flux_dit import PATCH
from qwenimg.common.networks.encoders import language_names, qwen
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names

NETWORKS = {
    "transformer": ovis_dit.NETWORK,
    "text_encoder": replace(qwen.QWEN3, stated={"taps": ()}),  # its states are those after the final norm
    "vae": kl_vae.NETWORK,
}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].state_size),
    fits.patches(lambda configs: PATCH**2 * configs["vae"].latent_channels),
)
OPENING = Opening(
    networks=NETWORKS,
    layouts={
        "transformer": ovis_names.LAYOUTS,
        "text_encoder": language_names.QWEN3,
        "vae": kl_vae_names.LAYOUTS,
    },
    model=lambda source: IMAGE.name,
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES),
)
