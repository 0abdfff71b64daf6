"""Flux.2's VAE in one file, with ldm names or diffusers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad, closed_on_error, is_folder
from qwenimg.common.formats.headers import open_header
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.vaes import flux2_vae
from qwenimg.common.networks.vaes.flux2_vae import STATISTICS, Flux2VAEConfig
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts import ldm_keys, vae_files
from qwenimg.common.parts.authors_names import check_known
from qwenimg.common.parts.components import component, open_component, read_config
from qwenimg.common.parts.ldm_configs import behind, stored_vae, vae_config
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.keys import Place, plan_places

_MEAN = f"{STATISTICS}running_mean"
_INSIDE = {"quant_conv.": "encoder.", "post_quant_conv.": "decoder."}
"""Where Black Forest Labs' files have these layers."""
_COUNTER = f"{STATISTICS}num_batches_tracked"


def is_vae(tensors: Mapping[str, Stored]) -> bool:
    """Return whether these tensors are those of a file that contains only Flux.2's VAE."""
    return _MEAN in tensors and vae_files.latent_channels(tensors) is not None


def open_vae(path: Path, like: Flux2VAEConfig, *, whole: bool = False) -> Component:
    """Open the VAE in a folder, or in a file alone. Its widths are those of the file; `like` has the fields that no
    tensor shows. Raises ModelError."""
    network = flux2_vae.NETWORK
    if is_folder(path):
        return open_component(network, path, read_config(network, path), "vae", whole=whole)
    header = open_header(path)
    with closed_on_error(header.file):
        if not is_vae(header.tensors):
            raise bad(path, "holds no VAE of FLUX.2, with the statistics of its latents")
        if vae_files.SIGN in header.tensors:
            return _open_ldm(header, like, whole=whole)
    header.file.close()
    return open_component(network, path, like, "vae", whole=whole)


def _open_ldm(header: Header, like: Flux2VAEConfig, *, whole: bool) -> Component:
    network, path = flux2_vae.NETWORK, header.file.path
    shapes = {_outside(name): shape for name, shape in behind(header, "").items()}
    plain = KLVAEConfig(**{field.name: getattr(like, field.name) for field in fields(KLVAEConfig)})
    config = parse(Flux2VAEConfig, asdict(like) | asdict(vae_config(path, shapes, plain)), source=path)
    manifest = network.manifest(config)
    places = {name: _inside(place, header.tensors) for name, place in ldm_keys.vae_places(manifest, config, "").items()}
    plan = plan_places(header, "vae", places, stored_vae(header, places, manifest), network.uses(config))
    unknown = [key for key in header.tensors if key not in plan.known and key != _COUNTER]
    check_known(path, unknown, "a VAE")
    return component(network, config, plan, whole=whole)


def _outside(name: str) -> str:
    """Return ldm's name of a tensor."""
    for layer, side in _INSIDE.items():
        if name.startswith(side + layer):
            return name.removeprefix(side)
    return name


def _inside(place: Place, tensors: Mapping[str, Stored]) -> Place:
    """Return the place of a parameter in a file with these tensors, which may have some layers inside of others."""
    for layer, side in _INSIDE.items():
        if place.key.startswith(layer) and side + place.key in tensors:
            return place._replace(key=side + place.key)
    return place
