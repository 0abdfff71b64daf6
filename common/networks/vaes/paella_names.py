"""Stable Cascade's VAE in files: its authors' names, which differ from diffusers' in the codebook alone."""

from __future__ import annotations

from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.networks.vaes import paella_vae
from qwenimg.common.networks.vaes.paella_vae import PaellaConfig

CODEBOOK = "vquantizer.codebook.weight"


def _config(stored: StoredShapes, like: PaellaConfig) -> PaellaConfig:
    """Return the configuration for stored shapes; the scale of the latents is that of `like`."""
    vectors, z = stored.shape("vquantizer.embedding.weight", 2)
    blocks = len(stored.blocks("up_blocks.0.0.weight"))
    levels = len(stored.blocks("down_blocks.0.gammas.weight")) // 2
    return stored.config(
        like,
        levels=levels,
        bottleneck_blocks=blocks - 1 - 2 * (levels - 1),
        embed_dim=stored.shape("up_blocks.0.0.bias", 1)[0],
        latent_channels=z,
        num_vq_embeddings=vectors,
    )


LAYOUTS = Layouts(
    network=paella_vae.NETWORK,
    title="Stable Cascade",
    rows=(
        Layout(names="its authors' names", signs=(CODEBOOK, "up_blocks.1.gammas")),
        Layout(names="diffusers' names", signs=("up_blocks.1.gammas", "up_blocks.0.0.weight")),
    ),
    config=_config,
)
