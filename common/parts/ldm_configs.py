"""The configurations of a VAE and a CLIP in a single file, from the shapes of their tensors.

Such a file has no configuration. It follows from the shapes, and from published values that shapes do not show: the
heads of text encoders have 64 channels.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from qwenimg.common.base.config import parse
from qwenimg.common.base.safe_files import bad
from qwenimg.common.base.shape import Manifest, Shape
from qwenimg.common.base.text import clean
from qwenimg.common.formats.stored import Header
from qwenimg.common.networks.encoders import clip
from qwenimg.common.networks.encoders.clip import CLIPConfig
from qwenimg.common.networks.vaes.kl_vae import KLVAEConfig
from qwenimg.common.parts.ldm_keys import CLIP_H_LAYERS, Places
from qwenimg.common.prompts.clip import EOS_PAD, OPEN_CLIP_PAD
from qwenimg.common.weights import comfy

Shapes = dict[str, Shape]

HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text encoder of a single file: its folder in diffusers' layout, its prefix, and what pads its prompts."""

    component: str
    prefix: str
    open_clip: bool = False  # trained by OpenCLIP, and in its names
    projected: bool = False
    converted: str = ""  # the prefix where stable-diffusion.cpp gave it transformers' names
    renamed: bool = False  # it has transformers' names

    @property
    def pad(self) -> str:
        return OPEN_CLIP_PAD if self.open_clip else EOS_PAD

    @property
    def fused(self) -> bool:
        """True if q, k and v are one matrix and the names are OpenCLIP's."""
        return self.open_clip and not self.renamed

    def within(self, names: Collection[str]) -> Text | None:
        """Return this text encoder with the prefix that it has in `names`; None if it is not there."""
        if self.converted and any(name.startswith(f"{self.converted}text_model.encoder.") for name in names):
            return replace(self, prefix=self.converted, renamed=True)
        return self if any(name.startswith(self.prefix) for name in names) else None


def behind(header: Header, prefix: str) -> Shapes:
    """Return the shapes of the tensors behind `prefix` in an open file, by the rest of their names. Raises
    ModelError."""
    shapes = comfy.value_shapes(header)
    return {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}


def shape_of(path: Path, shapes: Shapes, key: str, rank: int) -> Shape:
    """Return the shape of the tensor `key`. Raise ModelError if it is missing or has another rank."""
    shape = shapes.get(key)
    if shape is None or len(shape) != rank:
        fault = "lacks tensor" if shape is None else f"has not {rank} dimensions in tensor"
        raise bad(path, f"{fault} '{clean(key, 100)}': not a checkpoint as it is published")
    return shape


def vae_config(path: Path, shapes: Shapes, like: KLVAEConfig) -> KLVAEConfig:
    """Return the configuration of the VAE with these tensors. `like` has the fields that no tensor shows: the scale
    and the shift of the latents, and the groups of its norms. Raises ModelError."""
    widths = []
    for level in count():
        if level and f"encoder.down.{level}.block.0.conv2.weight" not in shapes:
            break
        widths.append(shape_of(path, shapes, f"encoder.down.{level}.block.0.conv2.weight", 4)[0])
    layers = sum(bool(re.fullmatch(r"encoder\.down\.0\.block\.\d+\.conv2\.weight", key)) for key in shapes)
    data: dict[str, Any] = asdict(like) | {
        "in_channels": shape_of(path, shapes, "encoder.conv_in.weight", 4)[1],
        "out_channels": shape_of(path, shapes, "decoder.conv_out.weight", 4)[0],
        "block_out_channels": widths,
        "layers_per_block": layers,
        "latent_channels": shape_of(path, shapes, "decoder.conv_in.weight", 4)[1],
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
    }
    return parse(KLVAEConfig, data, source=path)


def stored_vae(header: Header, places: Places, wanted: Manifest) -> Manifest:
    """Return `wanted` with the stored shapes of the attention's projections: many files have 1x1 convolutions."""
    stored = dict(wanted)
    for name, shape in wanted.items():
        tensor = header.tensors.get(places[name].key)
        if ".attentions.0.to_" in name and name.endswith(".weight") and tensor and len(tensor.shape) == 4:
            stored[name] = (*shape, 1, 1)
    return stored


def clip_config(path: Path, header: Header, text: Text) -> tuple[str, CLIPConfig]:
    """Return the prefix before the manifest's or OpenCLIP's names, and the configuration. Raises ModelError."""
    prefix = text.prefix
    if not text.fused and any(key.startswith(f"{prefix}text_model.") for key in header.tensors):
        prefix += "text_model."
    shapes = behind(header, prefix)
    layer = r"transformer\.resblocks\.(\d+)\." if text.fused else r"encoder\.layers\.(\d+)\."
    layers = len({match[1] for key in shapes if (match := re.match(layer, key))})
    names = {"token": "token_embedding.weight", "position": "positional_embedding", "inner": "0.mlp.c_fc.weight"}
    if not text.fused:
        token, position = (f"embeddings.{name}_embedding.weight" for name in ("token", "position"))
        names = {"token": token, "position": position, "inner": "0.mlp.fc1.weight"}
    inner = ("transformer.resblocks." if text.fused else "encoder.layers.") + names["inner"]
    vocabulary, width = shape_of(path, shapes, names["token"], 2)
    data: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape_of(path, shapes, inner, 2)[0],
        "num_hidden_layers": layers if text.projected or not text.open_clip else min(layers, CLIP_H_LAYERS),
        "num_attention_heads": max(1, width // HEAD_DIM),
        "max_position_embeddings": shape_of(path, shapes, names["position"], 2)[0],
        "hidden_act": "gelu" if text.open_clip else "quick_gelu",
        "eos_token_id": clip.LEGACY_EOS,
    }
    if text.projected and f"{text.prefix}text_projection.weight" in header.tensors:  # as transformers has it
        data["projection_dim"] = shape_of(path, behind(header, text.prefix), "text_projection.weight", 2)[0]
    elif text.projected:
        data["projection_dim"] = shape_of(path, shapes, "text_projection", 2)[1]
    return prefix, parse(CLIPConfig, data, source=path)
