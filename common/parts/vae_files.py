"""The channels of the latents of a VAE (AutoencoderKL) in a file."""

from __future__ import annotations

from collections.abc import Mapping

from qwenimg.common.formats.stored import Stored
from qwenimg.common.networks.vaes.kl_vae_names import DIFFUSERS_SIGN, SIGN
from qwenimg.common.weights.part_names import VAES


def latent_channels(tensors: Mapping[str, Stored]) -> int | None:
    """Return the channels of the latents of a VAE that is alone in a file with these tensors, in ldm or diffusers'
    names, ldm's behind a prefix or not; None for another file."""
    prefix = next((one for one in VAES if all(name.startswith(one) for name in tensors)), "")
    if prefix + SIGN not in tensors and DIFFUSERS_SIGN not in tensors:
        return None
    first = tensors.get(f"{prefix}decoder.conv_in.weight")
    return first.shape[1] if first is not None and len(first.shape) == 4 else None
