"""Rows from which an AuraFlow is opened: its networks, and what its parts must fit."""

from __future__ import annotations

from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.auraflow.known import SMALL_FILES
from qwenimg.common.families.opening import Opening
from qwenimg.common.networks.denoisers import aura_dit, aura_names
from qwenimg.common.networks.encoders import t5, t5_names
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names
from qwenimg.common.prompts import language

NETWORKS = {"transformer": aura_dit.NETWORK, "text_encoder": t5.UMT5, "vae": kl_vae.NETWORK}
LAYOUTS = {"transformer": aura_names.LAYOUTS, "text_encoder": t5_names.UMT5, "vae": kl_vae_names.LAYOUTS}
FITS = (
    fits.text_states(lambda configs: configs["text_encoder"].d_model),
    fits.LATENTS,
    fits.MADE_LATENTS,
)
OPENING = Opening(
    networks=NETWORKS,
    layouts=LAYOUTS,
    model=lambda source: "auraflow",  # all have the same configurations
    tokenizers=lambda source, parts: tokenizers.of_language_model(source, parts, SMALL_FILES, language.load),
    prefixes={"text_encoder": "text_encoders."},  # the transformer's, `model.`, is a text encoder's too
)
