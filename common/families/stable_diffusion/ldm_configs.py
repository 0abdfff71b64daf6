"""The types of Stable Diffusion, and the configuration of a single file's models from the shapes of their tensors.

No configuration is in such a file. What shapes say is read from them; what they cannot say is the type's: SD 1.x has 8
heads in every attention of its UNet, all others heads of 64 channels, as have the text encoders; group norms have 32
groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.families.stable_diffusion.ldm_keys import CLIP_H_LAYERS, Places
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks import clip, kl_vae, unet
from qwenimg.common.networks.clip import CLIPConfig
from qwenimg.common.networks.kl_vae import KLVAEConfig
from qwenimg.common.networks.unet import UNetConfig
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD

Shapes = dict[str, Shape]

FIRST = "input_blocks.0.0.weight"  # of the UNet
HEAD_DIM = 64
HEADS_SD1 = 8
NORM_GROUPS = 32
SIZE_CHANNELS = 256  # of each size that SDXL gets

_DEPTH = re.compile(r"(?P<block>(?:in|out)put_blocks\.\d+\.1|middle_block\.1)\.transformer_blocks\.(?P<index>\d+)\..*")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text encoder of a type: the folder that it has in diffusers' layout, its prefix, and what pads its prompts."""

    component: str
    prefix: str
    open_clip: bool = False  # trained by OpenCLIP, and in its names
    projected: bool = False
    converted: str = ""  # the prefix where stable-diffusion.cpp gave it transformers' names
    renamed: bool = False  # it has those

    @property
    def pad(self) -> str:
        return OPEN_CLIP_PAD if self.open_clip else EOS_PAD

    @property
    def fused(self) -> bool:
        """Whether q, k and v are one matrix, and the names OpenCLIP's."""
        return self.open_clip and not self.renamed

    def within(self, names: Collection[str]) -> Text | None:
        """It under the prefix that it has among `names`; None where it is not there."""
        if self.converted and any(name.startswith(f"{self.converted}text_model.encoder.") for name in names):
            return replace(self, prefix=self.converted, renamed=True)
        return self if any(name.startswith(self.prefix) for name in names) else None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A type of Stable Diffusion and what no header says about it."""

    title: str
    texts: tuple[Text, ...]
    scaling_factor: float
    sample_size: int  # latents along a side that it was trained on


KINDS: Mapping[str, Kind] = {
    "sd1": Kind(
        title="Stable Diffusion 1.x",
        texts=(Text(component="text_encoder", prefix="cond_stage_model.transformer."),),
        scaling_factor=0.18215,
        sample_size=64,
    ),
    "sd2": Kind(
        title="Stable Diffusion 2.x",
        texts=(
            Text(
                component="text_encoder",
                prefix="cond_stage_model.model.",
                open_clip=True,
                converted="cond_stage_model.transformer.",
            ),
        ),
        scaling_factor=0.18215,
        sample_size=64,
    ),
    "sdxl": Kind(
        title="Stable Diffusion XL base",
        texts=(
            Text(
                component="text_encoder",
                prefix="conditioner.embedders.0.transformer.",
                converted="cond_stage_model.transformer.",
            ),
            Text(
                component="text_encoder_2",
                prefix="conditioner.embedders.1.model.",
                open_clip=True,
                projected=True,
                converted="cond_stage_model.1.transformer.",
            ),
        ),
        scaling_factor=0.13025,
        sample_size=128,
    ),
    "sdxl-refiner": Kind(
        title="Stable Diffusion XL refiner",
        texts=(
            Text(component="text_encoder_2", prefix="conditioner.embedders.0.model.", open_clip=True, projected=True),
        ),
        scaling_factor=0.13025,
        sample_size=128,
    ),
}


# Configurations


def behind(header: Header, prefix: str) -> Shapes:
    """{rest of the name: shape} of the tensors behind `prefix`."""
    return {key.removeprefix(prefix): tensor.shape for key, tensor in header.tensors.items() if key.startswith(prefix)}


def _shape(path: Path, shapes: Shapes, key: str, rank: int) -> Shape:
    found = shapes.get(key)
    if found is None or len(found) != rank:
        what = "lacks tensor" if found is None else f"has not {rank} dimensions in tensor"
        raise bad(path, f"{what} '{clean(key, 100)}': not a Stable Diffusion checkpoint as it is published")
    return found


def unet_config(path: Path, shapes: Shapes, kind: str, prediction: str) -> UNetConfig:
    """Of the UNet with these tensors. Raises ModelError."""
    first, last = _shape(path, shapes, FIRST, 4), _shape(path, shapes, "out.2.weight", 4)
    depths = _depths(shapes)
    levels = _levels(path, shapes, depths)
    mid = depths.get("middle_block.1", 1)
    attends = [depth > 0 for _, _, depth in levels]
    text = _shape(path, shapes, "middle_block.1.transformer_blocks.0.attn2.to_k.weight", 2)
    sd1, sd2 = kind == "sd1", kind == "sd2"
    data: dict[str, Any] = {
        "in_channels": first[1],
        "out_channels": last[0],
        "sample_size": 96 if sd2 and prediction == "v" else KINDS[kind].sample_size,
        "block_out_channels": [width for width, _, _ in levels],
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attends)],
        "layers_per_block": [layers for _, layers, _ in levels],
        # of a level without attention it means nothing, but that of the last level is also the middle's
        "transformer_layers_per_block": [depth or 1 for _, _, depth in levels[:-1]] + [levels[-1][2] or mid],
        "attention_head_dim": [HEADS_SD1 if sd1 else max(1, width // HEAD_DIM) for width, _, _ in levels],
        "cross_attention_dim": text[1],
        # in GGUF they are 1x1 convolutions in any case
        "use_linear_projection": not sd1 or len(shapes.get("middle_block.1.proj_in.weight", ())) == 2,
        "norm_num_groups": NORM_GROUPS,
    }
    if "label_emb.0.0.weight" in shapes:
        data["addition_embed_type"] = "text_time"
        data["addition_time_embed_dim"] = SIZE_CHANNELS
        data["projection_class_embeddings_input_dim"] = _shape(path, shapes, "label_emb.0.0.weight", 2)[1]
    return parse(UNetConfig, unet.unet_fields(data), source=path)


def _depths(shapes: Iterable[str]) -> dict[str, int]:
    """Of each attention the number of its transformer blocks."""
    found: dict[str, set[str]] = {}
    for key in shapes:
        if match := _DEPTH.fullmatch(key):
            found.setdefault(match["block"], set()).add(match["index"])
    return {block: len(indices) for block, indices in found.items()}


def _levels(path: Path, shapes: Shapes, depths: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Of each level of the down blocks: channels, residual blocks, transformer blocks in each of its attentions."""
    levels: list[tuple[int, int, int]] = []
    width = layers = depth = 0
    for number in count(1):
        block = f"input_blocks.{number}"
        if f"{block}.0.out_layers.3.weight" in shapes:
            width = _shape(path, shapes, f"{block}.0.out_layers.3.weight", 4)[0]
            layers, depth = layers + 1, depths.get(f"{block}.1", 0)
            continue
        if not layers:
            raise bad(path, f"lacks tensor '{block}.0.out_layers.3.weight' of its UNet: download it again")
        levels.append((width, layers, depth))
        layers = 0
        if f"{block}.0.op.weight" not in shapes:
            break
    return levels


def vae_config(path: Path, shapes: Shapes, kind: Kind) -> KLVAEConfig:
    """Of the VAE with these tensors. Raises ModelError."""
    widths = []
    for level in count():
        if f"encoder.down.{level}.block.0.conv2.weight" not in shapes:
            break
        widths.append(_shape(path, shapes, f"encoder.down.{level}.block.0.conv2.weight", 4)[0])
    layers = sum(bool(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv2\.weight", key)) for key in shapes)
    latents = _shape(path, shapes, "decoder.conv_in.weight", 4)[1]
    data: dict[str, Any] = {
        "in_channels": _shape(path, shapes, "encoder.conv_in.weight", 4)[1],
        "out_channels": _shape(path, shapes, "decoder.conv_out.weight", 4)[0],
        "block_out_channels": widths,
        "layers_per_block": layers,
        "latent_channels": latents,
        "norm_num_groups": NORM_GROUPS,
        "sample_size": kind.sample_size * 8,
        "scaling_factor": kind.scaling_factor,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }
    return parse(KLVAEConfig, kl_vae.vae_fields(data), source=path)


def stored_vae(header: Header, places: Places, wanted: Manifest) -> Manifest:
    """`wanted` with the attention's projections as they are stored: 1x1 convolutions, unless they have two axes."""
    stored = dict(wanted)
    for name, shape in wanted.items():
        tensor = header.tensors.get(places[name].key)
        if ".attentions.0.to_" in name and name.endswith(".weight") and tensor and len(tensor.shape) == 4:
            stored[name] = (*shape, 1, 1)
    return stored


def clip_config(path: Path, header: Header, text: Text) -> tuple[str, CLIPConfig]:
    """The prefix of the names as they are in the manifest or in OpenCLIP, and the configuration."""
    prefix = text.prefix
    if not text.fused and f"{prefix}text_model.final_layer_norm.weight" in header.tensors:
        prefix += "text_model."
    shapes = behind(header, prefix)
    layer = r"transformer\.resblocks\.(\d+)\." if text.fused else r"encoder\.layers\.(\d+)\."
    layers = len({match[1] for key in shapes if (match := re.match(layer, key))})
    names = {"token": "token_embedding.weight", "position": "positional_embedding", "inner": "0.mlp.c_fc.weight"}
    if not text.fused:
        token, position = (f"embeddings.{name}_embedding.weight" for name in ("token", "position"))
        names = {"token": token, "position": position, "inner": "0.mlp.fc1.weight"}
    inner = ("transformer.resblocks." if text.fused else "encoder.layers.") + names["inner"]
    vocabulary, width = _shape(path, shapes, names["token"], 2)
    data: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": _shape(path, shapes, inner, 2)[0],
        "num_hidden_layers": layers if text.projected or not text.open_clip else min(layers, CLIP_H_LAYERS),
        "num_attention_heads": max(1, width // HEAD_DIM),
        "max_position_embeddings": _shape(path, shapes, names["position"], 2)[0],
        "hidden_act": "gelu" if text.open_clip else "quick_gelu",
        "eos_token_id": clip.LEGACY_EOS,
    }
    if text.projected and f"{text.prefix}text_projection.weight" in header.tensors:  # as transformers has it
        data["projection_dim"] = _shape(path, behind(header, text.prefix), "text_projection.weight", 2)[0]
    elif text.projected:
        data["projection_dim"] = _shape(path, shapes, "text_projection", 2)[1]
    return prefix, parse(CLIPConfig, data, source=path)
