"""The VAE of a model in a folder or file of its own: the one of its kind, or a tiny one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwenimg.common.base.safe_files import closed_on_error
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header, Stored
from qwenimg.common.networks.layout import Layouts
from qwenimg.common.networks.vaes import qwen21_vae, qwen_vae
from qwenimg.common.networks.vaes.kl_vae_names import DIFFUSERS_SIGN, SIGN
from qwenimg.common.parts import tiny_vae
from qwenimg.common.parts.components import config_at, renaming
from qwenimg.common.parts.open_file import open_part
from qwenimg.common.runtime.checkpoint import Component
from qwenimg.common.weights.part_names import VAES


def latent_channels(tensors: Mapping[str, Stored]) -> int | None:
    """Return the channels of the latents of a VAE that is alone in a file with these tensors, in ldm or diffusers'
    names, ldm's behind a prefix or not; None for another file."""
    prefix = next((one for one in VAES if all(name.startswith(one) for name in tensors)), "")
    if prefix + SIGN not in tensors and DIFFUSERS_SIGN not in tensors:
        return None
    first = tensors.get(f"{prefix}decoder.conv_in.weight")
    return first.shape[1] if first is not None and len(first.shape) == 4 else None


def is_qwen_vae(header: Header) -> bool:
    """Return whether a file has Qwen-Image's VAE and no other part: its norms or kernels have names of its own. mflux's
    names of norms are those of other VAEs too."""
    if len({key.startswith(VAES) for key in header.tensors}) > 1:  # the file of a whole model
        return False
    rename = renaming(qwen_vae.NETWORK, qwen_vae.NETWORK.config())
    if gguf.architecture(header) or not any(rename(key) == qwen_vae.SIGN for key in header.tensors):
        return False
    if any(qwen21_vae.rename(key) == qwen21_vae.SIGN for key in header.tensors):
        return False
    return any(key.endswith(".gamma") or qwen_vae.NETWORK.channels_last in key for key in header.tensors)


def open_vae(layouts: Layouts, path: Path, own: Any) -> Component:
    """Open the VAE that the user gives: one of `layouts`, or a tiny one. own: the configuration of the model's own, for
    what no tensor shows. Raises ModelError."""
    if tiny_vae.is_tiny_at(path):
        return open_tiny(path, own)
    return open_part(layouts, path, config_at(layouts.network, path, own), "vae")


def open_tiny(path: Path, own: Any) -> Component:
    """Open the tiny VAE in a folder or file. own: the configuration of the VAE whose place it takes. Raises
    ModelError."""
    part = tiny_vae.open_tiny(path, tiny_vae.patch_of(own))
    with closed_on_error(part.plan):
        tiny_vae.check_sizes(path, part.config, own)
    return part
