"""Other programs' names for the tensors of Qwen-Image's parts: strings only.

mflux has names of its own for some layers of the transformer and of the VAE, whose kernels have their channels last,
and puts the text encoder behind `encoder.`. ComfyUI has the transformer under a prefix, and the VAE, which is Wan's
video VAE, in Wan's names. Every such name follows from one of the manifest, so that missing and unknown tensors both
show. No name has two meanings, so a file may have any of them, and its names alone tell its layout.
"""

from __future__ import annotations

import re

from qwenimg.common.base.shape import Manifest
from qwenimg.common.networks.encoders import qwen_vl, qwen_vl_caption, qwen_vl_vision, vision_tower
from qwenimg.common.networks.vaes import wan_names
from qwenimg.common.parts.texts.text_lora_names import language_model_names
from qwenimg.common.runtime.checkpoint import Checkpoint
from qwenimg.common.weights.keys import Rename
from qwenimg.common.weights.loras.lora_names import DENOISER, Names, component_names
from qwenimg.common.weights.part_names import plain

_MFLUX = (
    (".attn.to_out.0.", ".attn.attn_to_out.0."),
    ("_mod.1.", "_mod_linear."),
    ("_mlp.net.0.proj.", "_ff.mlp_in."),
    ("_mlp.net.2.", "_ff.mlp_out."),
)
_MFLUX_TEXT = "encoder."
MFLUX_SIGNS = (
    "transformer_blocks.0.img_mod_linear.",
    "transformer_blocks.0.attn.attn_to_out.",
    "transformer_blocks.0.img_ff.",
)
"""Starts of the names that only mflux gives tensors of the transformer."""
CHANNELS_LAST = {"vae": ".conv3d."}
"""Text in tensor names of a part that only mflux's files have, whose kernels have their channels last."""

_ENDS, _RESIDUAL, _OUTSIDE = (  # Wan's names by those of diffusers
    {ours: theirs for theirs, ours in table.items()}
    for table in (wan_names.ENDS, wan_names.RESIDUAL, wan_names.OUTSIDE)
)
_UP = re.compile(r"up_blocks\.(?P<block>\d+)\.(?:resnets\.(?P<layer>\d+)|upsamplers\.0)\.(?P<rest>.+)")
_DOWN = re.compile(r"encoder\.down_blocks\.(?P<index>\d+)")


def transformer(manifest: Manifest) -> Rename:
    names = {_mflux(name): name for name in manifest}

    def rename(key: str) -> str | None:
        name = plain("transformer", key)
        return name if name is None else names.get(name, name)

    return rename


def text_encoder(manifest: Manifest) -> Rename:
    sees = any(name.startswith(vision_tower.PREFIX) for name in manifest)
    writes = qwen_vl_caption.HEAD in manifest
    inner = qwen_vl_caption.rename if writes else qwen_vl_vision.rename if sees else qwen_vl.rename

    def rename(key: str) -> str | None:
        name = plain("text", key)
        return name if name is None else inner(name.removeprefix(_MFLUX_TEXT))

    return rename


def vae(manifest: Manifest) -> Rename:
    layers = sum(
        name.startswith("decoder.up_blocks.0.resnets.") and name.endswith(".conv1.weight") for name in manifest
    )
    names = {_wan(name, layers): name for name in manifest}
    names |= {_mflux_vae(name, manifest, layers): name for name in manifest}

    def rename(key: str) -> str | None:
        name = plain("vae", key)
        return name if name is None else names.get(name, name)

    return rename


RENAMES = {"transformer": transformer, "text_encoder": text_encoder, "vae": vae}


def _mflux(name: str) -> str:
    for ours, theirs in _MFLUX:
        name = name.replace(ours, theirs)
    return name


def _mflux_vae(name: str, manifest: Manifest, layers: int) -> str:
    """Return mflux's name of a tensor of the VAE; `layers`: resnets in each of the decoder's blocks."""
    owner, _, leaf = name.rpartition(".")
    owner = owner.replace("conv_shortcut", "skip_conv").replace("resample.1", "resample_conv")
    owner = owner.replace("decoder.up_blocks.", "decoder.up_block")
    if down := _DOWN.match(owner):
        block, layer = divmod(int(down["index"]), layers)
        inner = "downsamplers.0" if layer == layers - 1 else f"resnets.{layer}"
        owner = f"encoder.down_blocks.{block}.{inner}{owner[down.end() :]}"
    if leaf == "gamma":
        return f"{owner}.weight"
    kernel = manifest[f"{name.rpartition('.')[0]}.weight"]
    return f"{owner}.conv3d.{leaf}" if len(kernel) == 5 else f"{owner}.{leaf}"


def _wan(name: str, layers: int) -> str:
    """Return Wan's name of a tensor; `layers`: resnets in each of the decoder's blocks."""
    side, _, rest = name.partition(".")
    if side not in ("encoder", "decoder"):
        return f"{_OUTSIDE[side]}.{rest}"
    if up := _UP.fullmatch(rest):
        layer = layers if up["layer"] is None else int(up["layer"])  # an upsampler counts as the last layer
        return f"{side}.upsamples.{int(up['block']) * (layers + 1) + layer}.{_residual(up['rest'])}"
    for part, wan in _ENDS.items():
        if rest.startswith(f"{part}."):
            return f"{side}.{wan}.{_residual(rest.removeprefix(f'{part}.'))}"
    block, index, inner = rest.split(".", 2)
    assert block == "down_blocks", name
    return f"{side}.downsamples.{index}.{_residual(inner)}"


def _residual(rest: str) -> str:
    """Return Wan's name for a part of a layer: of a residual block `conv1.weight` changes, else `resample.1.weight`
    does not."""
    part, _, leaf = rest.partition(".")
    return f"{_RESIDUAL[part]}.{leaf}" if part in _RESIDUAL else rest


def lora_names(checkpoint: Checkpoint) -> Names:
    """Return LoRA files' names for the layers of the transformer and the text encoder: the checkpoint's, dotted or
    flat."""
    transformer, text = (checkpoint[component].plan.shapes for component in ("transformer", "text_encoder"))
    starts = ("model.", "model.language_model.")
    return component_names("transformer", transformer, DENOISER), language_model_names(text, *starts)
