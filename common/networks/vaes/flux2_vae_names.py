"""Flux.2's VAE in files: its authors' names, which are ldm's with two layers elsewhere, ldm's, and diffusers'."""

from __future__ import annotations

from qwenimg.common.networks.layout import Layout, Layouts, StoredShapes
from qwenimg.common.networks.vaes import flux2_vae, kl_vae_names
from qwenimg.common.networks.vaes.flux2_vae import STATISTICS, Flux2VAEConfig
from qwenimg.common.weights.keys import Place

_MEAN = f"{STATISTICS}running_mean"
_INSIDE = {"quant_conv.": "encoder.", "post_quant_conv.": "decoder."}  # where its authors have these layers


def _place(name: str, config: Flux2VAEConfig) -> Place:
    """Return the place of a parameter in a file with its authors' names."""
    inside = next((side for layer, side in _INSIDE.items() if name.startswith(layer)), "")
    return Place(inside + kl_vae_names.place(name, config).key)


def _config(stored: StoredShapes, like: Flux2VAEConfig) -> Flux2VAEConfig:
    """Return the configuration for stored shapes; `like` has what no tensor shows."""
    shown = kl_vae_names.sizes(stored)
    last = len(shown["block_out_channels"]) - 1
    blocks = (f"decoder.up_blocks.{last - level}.resnets.0.conv2.weight" for level in range(last + 1))
    widths = [stored.shape(name, 4)[0] for name in blocks]
    narrower = widths if widths != shown["block_out_channels"] else None
    return stored.config(like, **shown, decoder_block_out_channels=narrower)


LAYOUTS = Layouts(
    network=flux2_vae.NETWORK,
    title="a VAE",
    expected="VAE of FLUX.2, with the statistics of its latents",
    rows=(
        Layout(
            names="its authors' names",
            signs=(kl_vae_names.SIGN, _MEAN, "encoder.quant_conv.weight"),
            place=_place,
            kernels=kl_vae_names.ATTENTION,
        ),
        Layout(
            names="ldm names",
            signs=(kl_vae_names.SIGN, _MEAN),
            place=kl_vae_names.place,
            kernels=kl_vae_names.ATTENTION,
        ),
        Layout(names="diffusers' names", signs=(kl_vae_names.DIFFUSERS_SIGN, _MEAN)),
    ),
    config=_config,
    ignored=(f"{STATISTICS}num_batches_tracked",),
)
