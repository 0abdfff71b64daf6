"""The description of one part of Qwen-Image in a file of its own. It has no configuration, so it is compared with the
published model."""

from __future__ import annotations

from dataclasses import dataclass

from qwenimg.common.base.amounts import counted
from qwenimg.common.base.errors import ModelError
from qwenimg.common.families.description import Description, listed, summary, weights_summary
from qwenimg.common.families.load_options import Prediction
from qwenimg.common.families.qwen_image.checkpoint import LAYOUTS, NETWORKS, is_tower
from qwenimg.common.families.qwen_image.variants import LAYERED, TEXT, QwenVariant, published_config
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.network import Network
from qwenimg.common.networks.vaes import qwen_vae
from qwenimg.common.parts import merged_file, vae_files
from qwenimg.common.parts.components import renaming
from qwenimg.common.weights.keys import named_weights

# A tensor that only this part has, and one whose shape shows its size.
_SIGNS = {
    "transformer": ("transformer_blocks.0.img_mod.1.weight", "img_in.weight"),
    "text_encoder": ("layers.0.self_attn.k_proj.bias", "norm.weight"),
    "vae": (qwen_vae.SIGN, "decoder.conv_in.weight"),
}


@dataclass(frozen=True, kw_only=True)
class QwenPart:
    """A part in a file of its own: it has no configuration, so it is compared with the published model."""

    option: str

    def reads(self, header: Header) -> bool:
        """Return whether a file has the part, by GGUF's architecture or by the names of its tensors."""
        if self.option == "text_encoder" and is_tower(header):
            return True
        return (
            LAYOUTS[self.option].find_in(header) is not None
            if self.option in LAYOUTS
            else vae_files.is_qwen_vae(header)
        )

    def opens(self, header: Header) -> bool:
        return False

    def describe(self, header: Header, prediction: Prediction | None) -> Description | None:
        return None if header.format == "GGUF" else _describe(self.option, header)

    def describe_similar(self, header: Header) -> Description | None:
        return None


def is_model(header: Header) -> bool:
    """Return whether a file with this header has the transformer and another part of the model."""
    return header.format != "GGUF" and merged_file.is_model(header, LAYOUTS["transformer"])


def _describe(part: str, header: Header) -> Description | None:
    """Describe the part in a file: its layout, its weights, and its faults. Return None for a tower."""
    (sign, size), network = _SIGNS[part], NETWORKS[part]
    variant = _variant(part, network, header)
    config = published_config(network, variant)
    manifest, rename = network.manifest(config), renaming(network, config)
    names = {name: key for key in header.tensors if (name := rename(key)) is not None}
    if size not in names:
        return None
    published = header.tensors[names[size]].shape == manifest[size]
    description = Description(lines=[f"layout: {_layout(part, variant, sign, names[sign])}"])
    if not published:
        description.lines.append(summary("file", header.tensors))
        description.lines.append("size: not the published model's; give its folder with -m")
        return description
    try:
        weights, unused = named_weights([header], rename, manifest)
    except ModelError as error:
        description.lines.append(summary("file", header.tensors))
        description.faults.append(str(error))
        return description
    description.lines.append(weights_summary("file", weights.values()))
    unneeded = len(unused) + sum(rename(key) is None for key in header.tensors)
    if unneeded:
        description.lines.append(f"known and not needed: {counted(unneeded, 'tensor')}")
    for kind, faulty in (("missing", manifest.keys() - weights.keys()), ("unknown", weights.keys() - manifest.keys())):
        if faulty:
            description.faults.append(f"{len(faulty)} {kind}: {listed(sorted(faulty))}")
    if not description.faults:
        description.lines.append(f"use it: qwenimg PROMPT --{part.replace('_', '-')} FILE")
    return description


def _variant(part: str, network: Network, header: Header) -> QwenVariant:
    """Return LAYERED for the transformer with a tensor more, and for the VAE with a channel more, that only
    Qwen-Image-Layered has; else TEXT."""
    rename = renaming(network, published_config(network, LAYERED))
    shapes = {name: stored.shape for key, stored in header.tensors.items() if (name := rename(key)) is not None}
    first = shapes.get("encoder.conv_in.weight", ())
    sees_alpha = part == "vae" and len(first) > 1 and first[1] == LAYERED.channels
    return LAYERED if qwen_dit.ADDITION in shapes or sees_alpha else TEXT


def _layout(part: str, variant: QwenVariant, sign: str, key: str) -> str:
    """Return the part and the layout of its names, by the file's name `key` for the tensor `sign`."""
    names = "Wan's names, as ComfyUI has it" if part == "vae" and ".conv3d." not in key else "mflux's names"
    if key.endswith(sign) and not key.startswith("encoder.layers."):
        prefix = key.removesuffix(sign)
        names = "transformers' names" if part == "text_encoder" else "diffusers' names"
        names += f" behind {prefix}" if prefix else ""
    model = "Qwen-Image-Layered" if variant.layered else "Qwen-Image"
    return f"{model}'s {part.replace('_', ' ')}, {names}"
