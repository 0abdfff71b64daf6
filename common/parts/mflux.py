"""A folder that mflux saved: parts with its names, quantized or not, and no configurations. Convolutions have their
channels last."""

from __future__ import annotations

from pathlib import Path

from qwenimg.common.base.safe_files import is_folder
from qwenimg.common.base.shape import Manifest
from qwenimg.common.base.text import clean
from qwenimg.common.formats.files import find_files
from qwenimg.common.formats.headers import peek
from qwenimg.common.networks.vaes import kl_vae
from qwenimg.common.weights.keys import Rename

_VAE = (".conv_in.conv2d.", ".conv_in.conv.", ".conv_out.conv2d.", ".conv_out.conv.", ".conv_norm_out.norm.")
CHANNELS_LAST = ".conv_in.conv"
"""Text in tensor names of a VAE that only mflux's files have, whose kernels have their channels last."""
_NOTES = {"mflux_version": "mflux", "quantization_level": "level"}


def layout(folder: Path, signs: tuple[str, ...]) -> str | None:
    """Return the layout of a folder whose transformer has a tensor that starts with one of `signs`, mflux's names, with
    that name; else None. Raises ModelError."""
    if not is_folder(folder / "transformer"):
        return None
    for path in find_files(folder / "transformer").files:
        header = peek(path)
        sign = next((key for key in header.tensors if key.startswith(signs)), None)
        if sign is not None:
            notes = [
                f"{word} {clean(header.metadata[key], 20)}" for key, word in _NOTES.items() if key in header.metadata
            ]
            return ", ".join([f"folder of mflux (its names, as {clean(sign, 80)})", *notes])
    return None


def vae(manifest: Manifest) -> Rename:
    """Return the function that renames keys of diffusers or mflux to those of the manifest."""
    network = kl_vae.NETWORK

    def rename(key: str) -> str | None:
        middle = next((one for one in _VAE if one in key), "")
        layer = middle.rpartition(".")[0].rpartition(".")[0]
        ours = key.replace(middle, f"{layer}.") if middle else key
        return network.rename(ours) if network.rename else ours

    return rename
