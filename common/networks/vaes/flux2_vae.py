"""Flux.2's VAE: Stable Diffusion's with more channels, and latents in patches: configuration and manifest.

What is unusual about it:
- its latents are patches of 2 x 2 of the other VAE's, in the order (c, dy, dx): four times the channels at half the
  sides;
- each of their channels has a mean and a variance of its own, which are tensors of the files (a batch norm's running
  statistics) and no part of the configuration; there is no scaling factor;
- an image is encoded to the mean of its latents, without noise;
- its decoder may be narrower than its encoder, as that of the small decoder, which is published apart.

Source: the reference class of diffusers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from qwenimg.common.base.errors import ModelError
from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks import params
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig

CLASS_NAME = "AutoencoderKLFlux2"

PATCH = 2
STATISTICS = "bn."
_MFLUX_OUT = re.compile(r"^((?:en|de)coder\.mid_block\.attentions\.0)\.to_out\.(?!0\.)")
_COUNTER = "bn.num_batches_tracked"  # of the training, a whole number


@dataclass(frozen=True, kw_only=True)
class Flux2VAEConfig(KLVAEConfig):
    """The fields of `vae/config.json` after `vae_fields`; the defaults are the published ones."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = field(default=2, metadata={"max": 64})
    latent_channels: int = field(default=32, metadata={"max": 1024})
    sample_size: int = 1024
    decoder_block_out_channels: tuple[int, ...] | None = None
    batch_norm_eps: float = 1e-4
    patch_size: tuple[int, ...] = (PATCH, PATCH)

    def __post_init__(self) -> None:
        if len(self.decoder_widths) != len(self.block_out_channels):
            raise ModelError(
                f"decoder_block_out_channels {list(self.decoder_widths)} has not the {len(self.block_out_channels)} "
                "levels of block_out_channels"
            )
        super().__post_init__()
        if self.patch_size != (PATCH, PATCH):
            raise ModelError(f"patch_size is {list(self.patch_size)}: not supported; expected {[PATCH, PATCH]}")
        if not self.batch_norm_eps > 0:
            raise ModelError(f"batch_norm_eps {self.batch_norm_eps} must be positive")

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """The channels of the decoder's levels, those of the image first."""
        return self.decoder_block_out_channels or self.block_out_channels

    @property
    def patch_channels(self) -> int:
        """The channels of the latents in patches."""
        return PATCH**2 * self.latent_channels


def manifest(config: Flux2VAEConfig) -> Manifest:
    """Return the shape of every tensor of the checkpoint, by its key in diffusers layout."""
    statistics = {f"{STATISTICS}{name}": (config.patch_channels,) for name in ("running_mean", "running_var")}
    return params.merge(kl_vae.manifest(config), statistics)


def rename(key: str) -> str | None:
    """Return the manifest key of a file's key; None for the counter of the batch norm."""
    return None if key == _COUNTER else kl_vae.rename(_MFLUX_OUT.sub(r"\1.to_out.0.", key))


NETWORK = Network(
    name="flux2_vae",
    role="vae",
    kind=CLASS_NAME,
    config=Flux2VAEConfig,
    manifest=manifest,
    fields=kl_vae.vae_fields,
    ignored=kl_vae.IGNORED_CONFIG | {"batch_norm_momentum"},
    rename=rename,
    channels_last=".mid_block.attentions.0.to_out.weight",
    traced=kl_vae.NETWORK.traced,
    described=kl_vae.NETWORK.described,
)
