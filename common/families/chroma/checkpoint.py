"""Rows from which a Chroma is opened."""

from __future__ import annotations

from qwenimg.common.families import fits, tokenizers
from qwenimg.common.families.chroma.known import HD
from qwenimg.common.families.opening import Opening
from qwenimg.common.networks.denoisers import chroma_dit, chroma_names
from qwenimg.common.networks.denoisers.flux_dit import PATCH
from qwenimg.common.networks.encoders import t5, t5_names
from qwenimg.common.networks.vaes import kl_vae, kl_vae_names

T5 = "text_encoder"
NETWORKS = {"transformer": chroma_dit.NETWORK, T5: t5.NETWORK, "vae": kl_vae.NETWORK}
FITS = (
    fits.text_states(lambda configs: configs[T5].d_model),
    fits.patches(lambda configs: PATCH**2 * configs["vae"].latent_channels),
)
OPENING = Opening(
    networks=NETWORKS,
    layouts={"transformer": chroma_names.LAYOUTS, T5: t5_names.LAYOUTS, "vae": kl_vae_names.LAYOUTS},
    model=lambda source: HD.name,
    tokenizers=lambda source, parts: tokenizers.of_clip_and_t5(source, parts, {}),
)
