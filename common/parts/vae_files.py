"""The VAE of a model (AutoencoderKL) from another folder or file than the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts import ldm_keys
from qwenimg.common.parts.authors_names import check_known
from qwenimg.common.parts.components import component, open_component, read_config
from qwenimg.common.parts.ldm_configs import behind, stored_vae, vae_config
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import plan_places
from qwenimg.common.weights.part_names import VAES
from qwenimg.common.weights.plan import stored_uses

SIGN = "decoder.mid.block_1.norm1.weight"
"""A tensor that only a VAE in ldm names has."""
_DIFFUSERS_SIGN = "decoder.mid_block.resnets.0.norm1.weight"
_IGNORED = ("loss.", "model_ema.")  # for training: discriminator and perceptual loss, and averaged weights


def prefix_of(names: Iterable[str]) -> str | None:
    """Return the prefix of the VAE in ldm names that a file with these `names` has, "" for one alone; None if it has
    none."""
    every = frozenset(names)
    return next((prefix for prefix in ("", *VAES) if prefix + SIGN in every), None)


def latent_channels(tensors: Mapping[str, Stored]) -> int | None:
    """Return the channels of the latents of a VAE that is alone in a file with these tensors, in ldm or diffusers'
    names, ldm's behind a prefix or not; None for another file."""
    prefix = next((one for one in VAES if all(name.startswith(one) for name in tensors)), "")
    if prefix + SIGN not in tensors and _DIFFUSERS_SIGN not in tensors:
        return None
    first = tensors.get(f"{prefix}decoder.conv_in.weight")
    return first.shape[1] if first is not None and len(first.shape) == 4 else None


def open_vae(path: Path, like: KLVAEConfig, *, whole: bool = False) -> Component:
    """Open the VAE in a folder, or in a file with ldm names, alone or with a whole model, or with diffusers' names.

    The widths are the file's. `like`, the configuration of the model's own VAE, has the fields that no tensor shows,
    such as the scale of the latents, and in diffusers' names the widths too. Raises ModelError."""
    if is_folder(path):
        return open_component(kl_vae.NETWORK, path, read_config(kl_vae.NETWORK, path), "vae", whole=whole)
    header = open_header(path)
    with closed_on_error(header.file):
        prefix = prefix_of(header.tensors)
        if prefix is not None:
            return _open_ldm(header, prefix, like, whole=whole)
        if _DIFFUSERS_SIGN not in header.tensors:
            raise bad(path, "holds no VAE: expected one with ldm names, as ae.safetensors, or with diffusers' names")
    header.file.close()
    return open_component(kl_vae.NETWORK, path, like, "vae", whole=whole)


def within(header: Header, prefix: str, like: KLVAEConfig, *, whole: bool = False) -> Component:
    """Open the VAE behind `prefix`, with ldm names, in the file of a whole model. The caller closes the file. Raises
    ModelError."""
    config = vae_config(header.file.path, behind(header, prefix), like)
    manifest = kl_vae.manifest(config)
    places = ldm_keys.vae_places(manifest, config, prefix)
    plan = plan_places(header, "vae", places, stored_vae(header, places, manifest), stored_uses(manifest))
    return component(kl_vae.NETWORK, config, plan, whole=whole)


def _open_ldm(header: Header, prefix: str, like: KLVAEConfig, *, whole: bool) -> Component:
    opened = within(header, prefix, like, whole=whole)
    ignored = tuple(prefix + start for start in _IGNORED)
    others = [key for key in header.tensors if key.startswith(prefix) and not key.startswith(ignored)]
    check_known(header.file.path, [key for key in others if key not in opened.plan.known], "a VAE")
    return opened
