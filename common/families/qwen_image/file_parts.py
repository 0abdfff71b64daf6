"""Which part of Qwen-Image is in a file, by its header alone."""

from __future__ import annotations

from qwenimg.common.families.qwen_image.control_files import is_control
from qwenimg.common.families.qwen_image.layouts import CHANNELS_LAST, RENAMES
from qwenimg.common.formats import gguf
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.denoisers import qwen_dit
from qwenimg.common.networks.encoders import qwen_vl
from qwenimg.common.networks.vaes import qwen21_vae, qwen_vae
from qwenimg.common.parts import merged_file
from qwenimg.common.parts.texts import towers

NETWORKS = {"transformer": qwen_dit.NETWORK, "text_encoder": qwen_vl.NETWORK, "vae": qwen_vae.NETWORK}
# A tensor that only this part has, and one whose shape shows its size.
SIGNS = {
    "transformer": ("transformer_blocks.0.img_mod.1.weight", "img_in.weight"),
    "text_encoder": ("layers.0.self_attn.k_proj.bias", "norm.weight"),
    "vae": ("decoder.mid_block.resnets.0.norm1.gamma", "decoder.conv_in.weight"),
}


def part_of(header: Header) -> str | None:
    """Return the part in a file with this header, by GGUF's architecture or by the names of its tensors, `model` for
    several, or `control` for a control network; None for another file."""
    if is_control(header.tensors):
        return "control"
    if is_tower(header):
        return "text_encoder"
    if is_model(header):
        return "model"
    architecture = gguf.architecture(header)
    for part, network in NETWORKS.items():
        if architecture and architecture not in network.architectures:
            continue
        rename = RENAMES[part](network.manifest(network.config()))
        if any(rename(key) == SIGNS[part][0] for key in header.tensors):
            return None if part == "vae" and not _is_own_vae(header) else part
    return None


def is_model(header: Header) -> bool:
    """Return whether a file with this header has the transformer and another part of the model."""
    rename = RENAMES["transformer"](qwen_dit.manifest(qwen_dit.NETWORK.config()))
    known = any(rename(key) == SIGNS["transformer"][0] for key in header.tensors)
    return known and header.format != "GGUF" and bool(merged_file.parts_of(header))


def is_tower(header: Header) -> bool:
    """Return whether a file with this header is the vision tower of Qwen2.5-VL alone, as llama.cpp has it."""
    return towers.is_tower(header, "qwen2.5vl_merger")


def _is_own_vae(header: Header) -> bool:
    """Return whether a VAE's norms or kernels have Qwen-Image's own names. mflux's names of norms are those of other
    VAEs too."""
    if any(qwen21_vae.rename(key) == qwen21_vae.SIGN for key in header.tensors):
        return False
    return any(key.endswith(".gamma") or CHANNELS_LAST["vae"] in key for key in header.tensors)
